//! The workload: prompts of text with images in between.

use kv_examples::error::ExampleError;
use kv_examples::model::{Model, Rng, Sample};
use kv_examples::monolithic;

use crate::error::EpdError;
use crate::images::ImageRef;
use crate::messages::Item;
use crate::vision::VisionTower;

/// The token that stands in a prompt for a row of an image. The row takes the place of its embedding.
const IMAGE_TOKEN: u32 = 0;
/// The most images in one prompt.
const MOST_IMAGES: usize = 3;

/// One request: a prompt with images.
#[derive(Debug, Clone)]
pub struct Request {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The images in the prompt, in order.
    pub items: Vec<Item>,
}

/// Makes `count` requests with one to three images each, and about `text_tokens` tokens of text. Neighbouring
/// requests share images.
pub fn make(seed: u64, count: usize, text_tokens: usize, vocab: usize, images: &[ImageRef]) -> Vec<Request> {
    let request = |number: usize| {
        let mut rng = Rng::named(seed, &format!("request {number}"));
        let mut text = |len: usize| (0..len).map(|_| rng.below(vocab as u64) as u32).collect::<Vec<u32>>();
        let wanted = (1 + number % MOST_IMAGES).min(images.len());
        let part = text_tokens / (wanted + 1);
        let mut prompt = text(part.max(1));
        let mut items = Vec::new();
        for image in images.iter().cycle().skip(number % images.len()).take(wanted) {
            items.push(Item { image: image.clone(), start: prompt.len() });
            prompt.resize(prompt.len() + image.grid.tokens(), IMAGE_TOKEN);
            prompt.extend(text(part.max(1)));
        }
        Request { prompt, items }
    };
    (0..count).map(request).collect()
}

/// Fails early if all requests of a round do not fit into the cache of a rank at once. A decode rank would
/// take pages back and compute the prompts again, for which it has no images.
pub fn check(
    requests: &[Request],
    max_new_tokens: usize,
    page_size: u32,
    pages: u32,
) -> Result<(), EpdError> {
    let reserved = max_new_tokens.max(kv_examples::decode::RESERVED_TOKENS as usize);
    let of = |request: &Request| (request.prompt.len() + reserved).div_ceil(page_size as usize) + 1;
    let needed = requests.iter().map(of).sum();
    if needed > pages as usize { Err(EpdError::TooManyPages { needed, pages }) } else { Ok(()) }
}

/// What a request gives in a run of everything in one process: no encoder, no cache, no transfer.
pub fn answer(
    model: &Model,
    tower: &VisionTower,
    request: &Request,
    max_new_tokens: usize,
) -> Result<Vec<Sample>, EpdError> {
    let mut inputs = Vec::new();
    for item in &request.items {
        inputs.push(tower.embed(&item.image)?.into_inputs(item.start));
    }
    let answer: Result<_, ExampleError> =
        monolithic::generate(model, &request.prompt, &inputs, max_new_tokens);
    Ok(answer?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{find, generate};
    use crate::scratch::Scratch;

    #[test]
    fn requests_have_one_to_three_images_and_share_them_with_others() {
        let dir = Scratch::new().unwrap();
        generate(dir.path(), 3, 5).unwrap();
        let images = find(dir.path(), 9).unwrap();
        let requests = make(3, 6, 20, 100, &images);
        let counts: Vec<usize> = requests.iter().map(|request| request.items.len()).collect();
        assert_eq!(counts, [1, 2, 3, 1, 2, 3]);
        assert_eq!(requests[1].items[1].image, requests[2].items[0].image);
        for request in &requests {
            for Item { image, start } in &request.items {
                let tokens = &request.prompt[*start..start + image.grid.tokens()];
                assert!(tokens.iter().all(|token| *token == IMAGE_TOKEN));
            }
        }
        let needed =
            requests.iter().map(|request| (request.prompt.len() + 64).div_ceil(16) + 1).sum::<usize>();
        let error = check(&requests, 4, 16, needed as u32 - 1).unwrap_err();
        assert!(error.to_string().starts_with(&format!("the requests of a round need {needed} pages")));
        check(&requests, 4, 16, needed as u32).unwrap();
    }
}
