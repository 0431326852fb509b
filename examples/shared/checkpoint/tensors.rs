//! Reads tensors from `*.safetensors`: one file, or several files with an index.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::CheckpointError;

/// The files of a checkpoint, and which tensor is in which file. One file at a time is kept in memory.
pub struct TensorFiles {
    dir: PathBuf,
    /// File of each tensor; empty if there is only `model.safetensors`.
    index: BTreeMap<String, String>,
    open: Option<(PathBuf, Vec<u8>)>,
}

/// The content of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl TensorFiles {
    /// Finds the tensor files in the directory `dir`.
    pub fn open(dir: &Path) -> Result<TensorFiles, CheckpointError> {
        let file = dir.join("model.safetensors.index.json");
        let index = match std::fs::read(&file) {
            Ok(bytes) => {
                serde_json::from_slice::<Index>(&bytes)
                    .map_err(|source| CheckpointError::Json { file, source })?
                    .weight_map
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(source) => return Err(CheckpointError::Read { file, source }),
        };
        Ok(TensorFiles { dir: dir.to_owned(), index, open: None })
    }

    /// Reads a tensor as f32; an error if it has another shape than `shape`.
    pub fn read(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let missing = || CheckpointError::Missing { name: name.to_owned() };
        let file = match self.index.get(name) {
            // Only the name counts: an index must not reach out of its directory.
            Some(file) => Path::new(file).file_name().ok_or_else(missing)?.into(),
            None if self.index.is_empty() => PathBuf::from("model.safetensors"),
            None => return Err(missing()),
        };
        let file = self.dir.join(file);
        let bytes = match self.open.take() {
            Some((open, bytes)) if open == file => bytes,
            _ => {
                std::fs::read(&file).map_err(|source| CheckpointError::Read { file: file.clone(), source })?
            }
        };
        let (_, bytes) = self.open.insert((file.clone(), bytes));
        let tensors = SafeTensors::deserialize(bytes)
            .map_err(|source| CheckpointError::Safetensors { file: file.clone(), source })?;
        let tensor = tensors.tensor(name).map_err(|_| missing())?;
        if tensor.shape() != shape {
            let (got, expected) = (tensor.shape().to_vec(), shape.to_vec());
            return Err(CheckpointError::Shape { name: name.to_owned(), got, expected });
        }
        match tensor.dtype() {
            Dtype::F32 => {
                Ok(tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
            }
            Dtype::F16 => Ok(halves(tensor.data()).map(f16_to_f32).collect()),
            Dtype::BF16 => {
                Ok(halves(tensor.data()).map(|half| f32::from_bits(u32::from(half) << 16)).collect())
            }
            got => Err(CheckpointError::Type { name: name.to_owned(), got }),
        }
    }
}

fn halves(data: &[u8]) -> impl Iterator<Item = u16> {
    data.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes))
}

/// Converts IEEE 754 binary16: one sign bit, five bits of exponent (bias 15), ten bits of mantissa.
fn f16_to_f32(half: u16) -> f32 {
    let (exponent, mantissa) = (half >> 10 & 0x1f, half & 0x3ff);
    let magnitude = match exponent {
        // Subnormal: a multiple of 2^-24, exact in f32.
        0 => f32::from(mantissa) * (-24.0f32).exp2(),
        0x1f => f32::from_bits(0x7f80_0000 | u32::from(mantissa) << 13),
        _ => f32::from_bits((u32::from(exponent) + 112) << 23 | u32::from(mantissa) << 13),
    };
    if half >> 15 == 1 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::f16_to_f32;

    #[test]
    fn half_precision_is_read_exactly() {
        for (half, number) in [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x3555, 0.333_251_95),
            (0x0400, 6.103_515_6e-5),
            (0x0001, 5.960_464_5e-8),
            (0x83ff, -6.097_555e-5),
            (0x7c00, f32::INFINITY),
        ] {
            assert_eq!(f16_to_f32(half), number, "{half:#x}");
        }
        assert!(f16_to_f32(0x7e00).is_nan());
    }
}
