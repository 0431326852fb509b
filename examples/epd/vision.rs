//! A small vision transformer in plain Rust: patches, blocks of attention and feed-forward, and a projection
//! to the width of the language model.
//!
//! The weights are made from a seed, and every sum adds its terms in one fixed order. So the embedding of an
//! image is the same, bit for bit, in every process that makes it.

use image::RgbImage;
use kv_examples::model::{InputRows, Rng};
use kv_math::{Columns, add, attend, matmul, rms_norm};

use crate::error::EpdError;
use crate::images::{ImageRef, PATCH};

/// The width of the residual stream.
const WIDTH: usize = 96;
/// The number of attention heads.
const HEADS: usize = 4;
/// The width inside the feed-forward block.
const INNER: usize = 192;
/// The number of blocks.
const BLOCKS: usize = 3;
/// The number of values of a patch: red, green and blue of each pixel.
const VALUES: usize = (PATCH * PATCH) as usize * 3;
/// The small number inside RMSNorm's root.
const EPS: f32 = 1e-5;

/// The embedding of an image: one row for each token.
#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    /// The number of elements of a row.
    pub width: usize,
    /// The elements, row by row.
    pub rows: Vec<f32>,
}

impl Embedding {
    /// The elements as bytes, little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.rows.iter().flat_map(|element| element.to_le_bytes()).collect()
    }

    /// The embedding of `rows` rows that these bytes hold. Bytes after the last row are padding.
    pub fn from_bytes(bytes: &[u8], rows: usize, width: usize) -> Result<Embedding, EpdError> {
        let shape = EpdError::Shape { bytes: bytes.len(), rows, width };
        let (elements, _) = bytes.as_chunks::<4>();
        let elements = elements.get(..rows * width).ok_or(shape)?;
        Ok(Embedding { width, rows: elements.iter().copied().map(f32::from_le_bytes).collect() })
    }

    /// The rows of a prompt in which the first token of the image has the position `start`.
    pub fn into_inputs(self, start: usize) -> InputRows {
        InputRows { start, rows: self.rows }
    }
}

/// A vision transformer that is ready to run.
#[derive(Debug)]
pub struct VisionTower {
    seed: u64,
    patch: Vec<f32>,
    blocks: Vec<Block>,
    norm: Vec<f32>,
    output: Vec<f32>,
    output_width: usize,
}

/// The parameters of one block, each matrix as (outputs × inputs).
#[derive(Debug)]
struct Block {
    attention_norm: Vec<f32>,
    /// Queries, keys and values, in this order.
    qkv: [Vec<f32>; 3],
    out: Vec<f32>,
    feed_norm: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
}

impl VisionTower {
    /// A transformer whose weights are drawn from `seed`, for a language model of the width `output_width`.
    pub fn new(seed: u64, output_width: usize) -> VisionTower {
        // Uniform with unit variance over the inputs keeps activations near one.
        let matrix = |name: &str, outputs: usize, inputs: usize| {
            let bound = (3.0 / inputs as f32).sqrt();
            let mut rng = Rng::named(seed, &format!("vision {name}"));
            (0..outputs * inputs).map(|_| rng.symmetric() * bound).collect::<Vec<f32>>()
        };
        let norm = |name: &str| {
            let mut rng = Rng::named(seed, &format!("vision {name}"));
            (0..WIDTH).map(|_| 1.0 + 0.1 * rng.symmetric()).collect::<Vec<f32>>()
        };
        let block = |i: usize| Block {
            attention_norm: norm(&format!("{i}.attention_norm")),
            qkv: ["q", "k", "v"].map(|part| matrix(&format!("{i}.{part}"), WIDTH, WIDTH)),
            out: matrix(&format!("{i}.out"), WIDTH, WIDTH),
            feed_norm: norm(&format!("{i}.feed_norm")),
            up: matrix(&format!("{i}.up"), INNER, WIDTH),
            down: matrix(&format!("{i}.down"), WIDTH, INNER),
        };
        VisionTower {
            seed,
            patch: matrix("patch", WIDTH, VALUES),
            blocks: (0..BLOCKS).map(block).collect(),
            norm: norm("norm"),
            output: matrix("output", output_width, WIDTH),
            output_width,
        }
    }

    /// The name and the revision of the model, for whoever compares embeddings of two workers.
    pub fn revision(&self) -> (String, String) {
        (format!("vision-{BLOCKS}x{WIDTH}"), format!("seed-{}", self.seed))
    }

    /// The number of elements of a row of an embedding.
    pub fn output_width(&self) -> usize {
        self.output_width
    }

    /// Decodes an image and computes its embedding: one row for each patch, row by row of the image.
    pub fn embed(&self, image: &ImageRef) -> Result<Embedding, EpdError> {
        Ok(self.embed_pixels(&image.pixels()?))
    }

    /// The embedding of an image whose sides are multiples of [`PATCH`].
    fn embed_pixels(&self, pixels: &RgbImage) -> Embedding {
        let (columns, rows) = (pixels.width() / PATCH, pixels.height() / PATCH);
        let mut patches = Vec::with_capacity(pixels.as_raw().len());
        let places = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        for (row, column) in places.clone() {
            for y in 0..PATCH {
                for x in 0..PATCH {
                    let pixel = pixels.get_pixel(column * PATCH + x, row * PATCH + y);
                    patches.extend(pixel.0.map(|value| f32::from(value) / 127.5 - 1.0));
                }
            }
        }
        let tokens = (rows * columns) as usize;
        let mut stream = vec![0.0; tokens * WIDTH];
        matmul(&patches, &self.patch, VALUES, &mut stream);
        for (place, token) in places.zip(stream.chunks_exact_mut(WIDTH)) {
            add_position(token, place);
        }
        for block in &self.blocks {
            block.attention(&mut stream);
            block.feed_forward(&mut stream);
        }
        let mut normed = vec![0.0; stream.len()];
        rms_norm(&stream, &self.norm, EPS, &mut normed);
        let mut out = vec![0.0; tokens * self.output_width];
        matmul(&normed, &self.output, WIDTH, &mut out);
        Embedding { width: self.output_width, rows: out }
    }
}

impl Block {
    /// Attention of every patch over all patches.
    fn attention(&self, stream: &mut [f32]) {
        let dim = WIDTH / HEADS;
        let scale = (dim as f32).sqrt().recip();
        let mut normed = vec![0.0; stream.len()];
        rms_norm(stream, &self.attention_norm, EPS, &mut normed);
        let [queries, keys, values] = self.qkv.each_ref().map(|weights| {
            let mut out = vec![0.0; stream.len()];
            matmul(&normed, weights, WIDTH, &mut out);
            out
        });
        let mut mixed = vec![0.0; stream.len()];
        for (query, mix) in queries.chunks_exact(WIDTH).zip(mixed.chunks_exact_mut(WIDTH)) {
            for at in (0..WIDTH).step_by(dim) {
                let of_head = |rows| Columns { rows, width: WIDTH, first: at };
                let (query, mix) = (&query[at..at + dim], &mut mix[at..at + dim]);
                attend(query, scale, of_head(&keys), of_head(&values), mix);
            }
        }
        matmul(&mixed, &self.out, WIDTH, &mut normed);
        add(stream, &normed);
    }

    fn feed_forward(&self, stream: &mut [f32]) {
        let mut normed = vec![0.0; stream.len()];
        rms_norm(stream, &self.feed_norm, EPS, &mut normed);
        let mut inner = vec![0.0; stream.len() / WIDTH * INNER];
        matmul(&normed, &self.up, WIDTH, &mut inner);
        inner.iter_mut().for_each(|x| *x = gelu(*x));
        matmul(&inner, &self.down, INNER, &mut normed);
        add(stream, &normed);
    }
}

/// The Gaussian error linear unit, by its usual approximation (arXiv 1606.08415).
fn gelu(x: f32) -> f32 {
    let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

/// Adds sines and cosines of the row to one half of a token, and of the column to the other half.
fn add_position(token: &mut [f32], (row, column): (u32, u32)) {
    let half = WIDTH / 2;
    for (place, part) in [row, column].into_iter().zip(token.chunks_exact_mut(half)) {
        for (i, pair) in part.chunks_exact_mut(2).enumerate() {
            let frequency = 100.0_f32.powf(-2.0 * i as f32 / half as f32);
            let (sine, cosine) = (place as f32 * frequency).sin_cos();
            pair[0] += sine;
            pair[1] += cosine;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::images::{find, generate};
    use crate::scratch::Scratch;

    const SEED: u64 = 5;
    const DIR: &str = "KV_EPD_TEST_IMAGES";

    /// One line for each image of a directory: its name and all bytes of its embedding.
    fn lines(dir: &std::path::Path) -> Vec<String> {
        let tower = VisionTower::new(SEED, 64);
        let line = |image: &ImageRef| {
            let bytes = tower.embed(image).unwrap().to_bytes();
            let bytes: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("embedding {} {bytes}", image.name())
        };
        find(dir, 20).unwrap().iter().map(line).collect()
    }

    #[test]
    fn two_processes_compute_the_same_embedding_bit_for_bit() {
        if let Some(dir) = std::env::var_os(DIR) {
            lines(dir.as_ref()).iter().for_each(|line| println!("\n{line}"));
            return;
        }
        let dir = Scratch::new().unwrap();
        generate(dir.path(), SEED, 4).unwrap();
        let name = "vision::tests::two_processes_compute_the_same_embedding_bit_for_bit";
        let mut other = Command::new(std::env::current_exe().unwrap());
        let said = other.args(["--exact", name, "--nocapture"]).env(DIR, dir.path()).output().unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        let theirs: Vec<&str> = said.lines().filter(|line| line.starts_with("embedding ")).collect();
        assert_eq!(theirs, lines(dir.path()));
        assert_eq!(theirs.len(), 4);
    }

    #[test]
    fn every_pixel_and_every_place_changes_every_row() {
        let tower = VisionTower::new(SEED, 8);
        let mut pixels = RgbImage::from_fn(48, 32, |x, y| image::Rgb([x as u8, y as u8, 90]));
        let before = tower.embed_pixels(&pixels);
        assert_eq!((before.width, before.rows.len()), (8, 6 * 8));
        assert!(before.rows.iter().all(|x| x.is_finite() && x.abs() < 20.0), "{before:?}");
        pixels.get_pixel_mut(47, 31).0[2] = 200;
        let after = tower.embed_pixels(&pixels);
        for (before, after) in before.rows.chunks_exact(8).zip(after.rows.chunks_exact(8)) {
            assert_ne!(before, after);
        }
        // Six patches of one colour differ only by their places.
        let plain = tower.embed_pixels(&RgbImage::from_pixel(48, 32, image::Rgb([9, 9, 9])));
        let rows: Vec<&[f32]> = plain.rows.chunks_exact(8).collect();
        assert!((0..6).all(|i| (0..i).all(|j| rows[i] != rows[j])));
    }

    #[test]
    fn bytes_of_an_embedding_are_read_back_and_too_few_are_refused() {
        let embedding = Embedding { width: 3, rows: vec![1.5, -2.0, f32::MIN, 0.0, 7.25, 1e-40] };
        let mut bytes = embedding.to_bytes();
        assert_eq!(bytes.len(), 24);
        bytes.extend([1; 40]);
        assert_eq!(Embedding::from_bytes(&bytes, 2, 3).unwrap(), embedding);
        let error = Embedding::from_bytes(&bytes[..23], 2, 3).unwrap_err();
        assert_eq!(error.to_string(), "an embedding of 23 bytes is no matrix of 2 × 3 numbers of 4 bytes");
    }
}
