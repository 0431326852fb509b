//! The errors of this example.

use std::path::PathBuf;

use kv_examples::error::ExampleError;

/// Why the example cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum EpdError {
    /// A part that all examples share has failed.
    #[error(transparent)]
    Shared(#[from] ExampleError),
    /// The memory of the encoder cache cannot be made.
    #[error(transparent)]
    Region(#[from] kv_ec::RegionError),
    /// The worker of the encoder cache did not start.
    #[error(transparent)]
    Start(#[from] kv_ec::EcStartError),
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A file is no image that the example can decode.
    #[error("{}: {source}", path.display())]
    Image {
        /// The path of the file.
        path: PathBuf,
        /// What is wrong with the file.
        source: image::ImageError,
    },
    /// A directory has no image.
    #[error("{} has no file that ends in .png, .jpg or .jpeg", path.display())]
    NoImages {
        /// The path of the directory.
        path: PathBuf,
    },
    /// The bytes of an embedding are not a number of rows.
    #[error("an embedding of {bytes} bytes is no matrix of {rows} × {width} numbers of 4 bytes")]
    Shape {
        /// The length of the embedding, in bytes.
        bytes: usize,
        /// The number of rows that the image should have.
        rows: usize,
        /// The number of elements that each row should have.
        width: usize,
    },
    /// The requests do not fit into the cache of a rank.
    #[error("the requests of a round need {needed} pages, and a rank has {pages}: raise --pages")]
    TooManyPages {
        /// Pages of all requests of a round, with what the requests grow by.
        needed: usize,
        /// Pages of a rank.
        pages: u32,
    },
}
