//! Images: real PNG and JPEG files, found in a directory or made from a seed.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use image::codecs::jpeg::JpegEncoder;
use image::imageops::{self, FilterType};
use image::{ImageFormat, ImageReader, RgbImage};
use kv_examples::model::Rng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::EpdError;

/// The side of a patch, in pixels. An image gives one token for each patch.
pub const PATCH: u32 = 16;
/// The quality of the JPEG files that the example makes, in percent.
const JPEG_QUALITY: u8 = 92;

/// An image as the router names it to the processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ImageRef {
    /// The path of the file.
    pub path: PathBuf,
    /// SHA-256 of the bytes of the file, in hexadecimal: the content hash (vLLM: `mm_hash`). Two files with
    /// equal bytes are one entry of the encoder cache.
    pub hash: String,
    /// The patches of the image.
    pub grid: Grid,
}

/// The number of patches of an image in each direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grid {
    /// The number of patches from top to bottom.
    pub rows: u32,
    /// The number of patches from left to right.
    pub columns: u32,
}

impl Grid {
    /// The grid of an image of `width` × `height` pixels: as many patches as the image has pixels for, but at
    /// most `most`, with the same proportions, and at least one in each direction.
    pub fn of(width: u32, height: u32, most: u32) -> Grid {
        let [columns, rows] = [width, height].map(|pixels| f64::from(pixels) / f64::from(PATCH));
        let scale = (f64::from(most) / (columns * rows).max(1.0)).sqrt().min(1.0);
        let [columns, rows] = [columns, rows].map(|side| ((side * scale) as u32).clamp(1, most));
        // A strip keeps one patch in the short direction, which the long direction pays for.
        Grid { rows: rows.min(most / columns), columns: columns.min(most / rows) }
    }

    /// The number of patches, and so of tokens and of rows of the embedding.
    pub fn tokens(&self) -> usize {
        self.rows as usize * self.columns as usize
    }
}

impl ImageRef {
    /// Reads the content hash and the size of the image at `path`, which is to have at most `most` patches.
    pub fn read(path: &Path, most: u32) -> Result<ImageRef, EpdError> {
        let bytes = read(path)?;
        let size = open(&bytes).and_then(|reader| reader.into_dimensions());
        let (width, height) = size.map_err(|source| EpdError::Image { path: path.to_owned(), source })?;
        let hash = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(ImageRef { path: path.to_owned(), hash, grid: Grid::of(width, height, most) })
    }

    /// The name of the file, for tables.
    pub fn name(&self) -> String {
        self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Decodes the file, and scales the image to whole patches.
    pub fn pixels(&self) -> Result<RgbImage, EpdError> {
        let pixels = decode(&self.path)?;
        let (width, height) = (self.grid.columns * PATCH, self.grid.rows * PATCH);
        Ok(imageops::resize(&pixels, width, height, FilterType::Triangle))
    }
}

/// The PNG and JPEG files of a directory, ordered by name.
pub fn find(dir: &Path, most: u32) -> Result<Vec<ImageRef>, EpdError> {
    let failed = |source| EpdError::File { path: dir.to_owned(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let ending = path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase());
        if ending.is_some_and(|ending| matches!(ending.as_str(), "png" | "jpg" | "jpeg")) {
            paths.push(path);
        }
    }
    paths.sort();
    if paths.is_empty() {
        return Err(EpdError::NoImages { path: dir.to_owned() });
    }
    paths.iter().map(|path| ImageRef::read(path, most)).collect()
}

/// Makes `count` small images from a seed, and writes them into `dir`: PNG and JPEG in turn.
pub fn generate(dir: &Path, seed: u64, count: usize) -> Result<(), EpdError> {
    for number in 0..count {
        let pixels = draw(seed, number);
        let mut bytes = Cursor::new(Vec::new());
        let (path, encoded) = match number % 2 {
            0 => (dir.join(format!("image-{number}.png")), pixels.write_to(&mut bytes, ImageFormat::Png)),
            _ => {
                let jpeg = JpegEncoder::new_with_quality(&mut bytes, JPEG_QUALITY);
                (dir.join(format!("image-{number}.jpg")), pixels.write_with_encoder(jpeg))
            }
        };
        encoded.map_err(|source| EpdError::Image { path: path.clone(), source })?;
        std::fs::write(&path, bytes.into_inner()).map_err(|source| EpdError::File { path, source })?;
    }
    Ok(())
}

/// The pixels of a generated image: slopes of three colours, with a bright disc.
fn draw(seed: u64, number: usize) -> RgbImage {
    let mut rng = Rng::named(seed, &format!("image {number}"));
    let mut between = |low: u32, high: u32| low + rng.below(u64::from(high - low)) as u32;
    let (width, height) = (between(80, 200), between(80, 200));
    let slopes = [between(0, 256), between(0, 256), between(0, 256)];
    let (x0, y0, radius) = (between(20, width), between(20, height), between(10, 40));
    RgbImage::from_fn(width, height, |x, y| {
        let inside = x.abs_diff(x0).pow(2) + y.abs_diff(y0).pow(2) < radius.pow(2);
        let at = |slope: u32| (x * slope / width + y * (255 - slope.min(255)) / height).min(255) as u8;
        image::Rgb(if inside { [250, 240, 60] } else { slopes.map(at) })
    })
}

fn read(path: &Path) -> Result<Vec<u8>, EpdError> {
    std::fs::read(path).map_err(|source| EpdError::File { path: path.to_owned(), source })
}

fn open(bytes: &[u8]) -> image::ImageResult<ImageReader<Cursor<&[u8]>>> {
    Ok(ImageReader::new(Cursor::new(bytes)).with_guessed_format()?)
}

/// The pixels of the file at `path`.
fn decode(path: &Path) -> Result<RgbImage, EpdError> {
    let bytes = read(path)?;
    let decoded = open(&bytes).and_then(ImageReader::decode);
    Ok(decoded.map_err(|source| EpdError::Image { path: path.to_owned(), source })?.into_rgb8())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn png_files_decode_to_the_pixels_drawn_and_jpeg_files_to_pixels_near_them() {
        let dir = Scratch::new().unwrap();
        generate(dir.path(), 7, 4).unwrap();
        let images = find(dir.path(), 64).unwrap();
        assert_eq!(images.len(), 4);
        for (number, image) in images.iter().enumerate() {
            let (drawn, decoded) = (draw(7, number), decode(&image.path).unwrap());
            assert_eq!(decoded.dimensions(), drawn.dimensions());
            let differences = decoded.as_raw().iter().zip(drawn.as_raw()).map(|(a, b)| a.abs_diff(*b));
            let sum: u64 = differences.clone().map(u64::from).sum();
            let mean = sum as f64 / decoded.as_raw().len() as f64;
            match image.name().ends_with(".png") {
                true => assert_eq!(sum, 0, "{}", image.name()),
                // Edges of the disc lose the most.
                false => assert!(sum > 0 && mean < 4.0, "{}: {mean}", image.name()),
            }
        }
    }

    #[test]
    fn files_with_equal_bytes_have_one_hash_and_other_files_have_others() {
        let dir = Scratch::new().unwrap();
        generate(dir.path(), 7, 2).unwrap();
        std::fs::copy(dir.path().join("image-0.png"), dir.path().join("image-2.PNG")).unwrap();
        let images = find(dir.path(), 64).unwrap();
        assert_eq!(images[0].hash, images[2].hash);
        assert_ne!(images[0].hash, images[1].hash);
        std::fs::write(dir.path().join("abc.png"), "abc").unwrap();
        let error = find(dir.path(), 64).unwrap_err();
        assert!(error.to_string().contains("abc.png: "), "{error}");
        let empty = Scratch::new().unwrap();
        assert!(matches!(find(empty.path(), 64), Err(EpdError::NoImages { .. })));
        // The hash of the three letters, from FIPS 180-2.
        let abc: String = Sha256::digest(b"abc").iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(abc.starts_with("ba7816bf8f01cfea"), "{abc}");
    }

    #[test]
    fn grids_keep_proportions_and_never_pass_their_limit() {
        let of = |width, height, most| {
            let grid = Grid::of(width, height, most);
            (grid.rows, grid.columns)
        };
        assert_eq!(of(160, 80, 64), (5, 10));
        assert_eq!(of(1600, 1600, 64), (8, 8));
        assert_eq!(of(3, 5, 64), (1, 1));
        for (width, height) in [(1, 100_000), (100_000, 1), (65_000, 40), (4000, 3000), (1, 1)] {
            for most in [1, 2, 7, 64, 1024] {
                let grid = Grid::of(width, height, most);
                assert!((1..=most as usize).contains(&grid.tokens()), "{width}×{height}: {grid:?}");
            }
        }
    }
}
