//! Multi-head latent attention that reads the cache as it is: instead of computing keys and values from the
//! latent vectors, the weights that would compute them are applied to the query and to the weighted sum.

use kv_math::{Columns, add_scaled, attend, dot};

use super::config::Latent;
use super::rope::Rope;

impl Latent {
    /// Rotates the part of each query head, and of the cached row, that depends on the position.
    pub fn rotate(&self, head_dim: usize, angles: &[(f32, f32)], query: &mut [f32], row: &mut [f32]) {
        for head in query.chunks_exact_mut(head_dim + self.qk_rope_head_dim) {
            Rope::rotate(angles, &mut head[head_dim..]);
        }
        Rope::rotate(angles, &mut row[self.kv_lora_rank..]);
    }

    /// The attention of one token over all rows up to its own. `up` holds, for each head, the rows that
    /// compute its key from a latent vector, and then the rows that compute its value.
    pub fn attend(&self, head_dim: usize, up: &[f32], query: &[f32], rows: &[f32], mix: &mut [f32]) {
        let (rank, width) = (self.kv_lora_rank, self.width());
        let query_dim = head_dim + self.qk_rope_head_dim;
        let scale = (query_dim as f32).sqrt().recip();
        let heads = query.chunks_exact(query_dim).zip(mix.chunks_exact_mut(head_dim));
        for ((query, mix), up) in heads.zip(up.chunks_exact(2 * head_dim * rank)) {
            let (up_key, up_value) = up.split_at(head_dim * rank);
            let (plain, rotated) = query.split_at(head_dim);
            let mut latent_query = vec![0.0; rank];
            for (x, row) in plain.iter().zip(up_key.chunks_exact(rank)) {
                add_scaled(&mut latent_query, *x, row);
            }
            latent_query.extend_from_slice(rotated);
            let rows = Columns { rows, width, first: 0 };
            let mut latent = vec![0.0; rank];
            attend(&latent_query, scale, rows, rows, &mut latent);
            for (out, row) in mix.iter_mut().zip(up_value.chunks_exact(rank)) {
                *out = dot(&latent, row);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_math::softmax;

    use super::*;
    use crate::model::Rng;

    /// The same with a key and a value computed for each token and head, as in the paper.
    fn spelt_out(latent: Latent, dim: usize, up: &[f32], query: &[f32], rows: &[f32]) -> Vec<f32> {
        let (rank, query_dim) = (latent.kv_lora_rank, dim + latent.qk_rope_head_dim);
        let mut out = Vec::new();
        for (query, up) in query.chunks_exact(query_dim).zip(up.chunks_exact(2 * dim * rank)) {
            let project = |row: &[f32], first: usize| -> Vec<f32> {
                (first..first + dim).map(|i| dot(&row[..rank], &up[i * rank..(i + 1) * rank])).collect()
            };
            let score = |row: &[f32]| {
                let key = [project(row, 0), row[rank..].to_vec()].concat();
                dot(query, &key) / (query_dim as f32).sqrt()
            };
            let mut scores: Vec<f32> = rows.chunks_exact(latent.width()).map(score).collect();
            softmax(&mut scores);
            let mut sum = vec![0.0; dim];
            for (score, row) in scores.iter().zip(rows.chunks_exact(latent.width())) {
                add_scaled(&mut sum, *score, &project(row, dim));
            }
            out.append(&mut sum);
        }
        out
    }

    #[test]
    fn reading_the_latent_vectors_gives_what_keys_and_values_of_each_head_give() {
        let (latent, dim, heads, tokens) = (Latent { kv_lora_rank: 6, qk_rope_head_dim: 4 }, 8, 3, 5);
        let mut rng = Rng::new(4);
        let mut random = |len: usize| (0..len).map(|_| rng.symmetric()).collect::<Vec<f32>>();
        let up = random(heads * 2 * dim * latent.kv_lora_rank);
        let query = random(heads * (dim + latent.qk_rope_head_dim));
        let rows = random(tokens * latent.width());
        let mut mix = vec![0.0; heads * dim];
        latent.attend(dim, &up, &query, &rows, &mut mix);
        let expected = spelt_out(latent, dim, &up, &query, &rows);
        assert!(expected.iter().any(|x| x.abs() > 0.1), "{expected:?}");
        for (got, expected) in mix.iter().zip(&expected) {
            assert!((got - expected).abs() < 1e-5, "{mix:?} {expected:?}");
        }
    }
}
