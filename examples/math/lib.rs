//! The arithmetic of the examples' models, and the conversion of their values to bytes: the parts of the examples that take
//! long unless they are optimised. Every sum adds its terms in one fixed order.
//!
//! What this crate is not: a library of linear algebra. It has what the models need, for their shapes.

/// Partial sums of a dot product: term `i` goes to sum `i % LANES`. Wide enough for the compiler to
/// use vector registers without reordering anything.
const LANES: usize = 8;

/// How many tokens are multiplied with one row of weights at a time, so that the row is loaded once. For 64 tokens, eight at a
/// time took less than half of the time of four at a time.
const TILE: usize = 8;

/// The dot product of `a` and `b`.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let [sum] = dot_tile([a], b);
    sum
}

/// `output[t][o] = input[t] · weights[o]` for row-major `input` (tokens × `inner`), `weights`
/// (outputs × `inner`) and `output` (tokens × outputs).
pub fn matmul(input: &[f32], weights: &[f32], inner: usize, output: &mut [f32]) {
    let outputs = weights.len() / inner;
    for (rows, sums) in input.chunks(inner * TILE).zip(output.chunks_mut(outputs * TILE)) {
        if rows.len() == inner * TILE {
            let tokens: [&[f32]; TILE] = std::array::from_fn(|t| &rows[t * inner..(t + 1) * inner]);
            for (o, row) in weights.chunks_exact(inner).enumerate() {
                for (t, sum) in dot_tile(tokens, row).into_iter().enumerate() {
                    sums[t * outputs + o] = sum;
                }
            }
        } else {
            for (token, sums) in rows.chunks_exact(inner).zip(sums.chunks_exact_mut(outputs)) {
                for (row, sum) in weights.chunks_exact(inner).zip(sums) {
                    *sum = dot(token, row);
                }
            }
        }
    }
}

/// `T` dot products with the same `row`. The order of additions does not depend on `T`. Loops instead of closures keep
/// the sums in registers, whatever is inlined.
#[inline(always)]
fn dot_tile<const T: usize>(tokens: [&[f32]; T], row: &[f32]) -> [f32; T] {
    let (row_chunks, row_rest) = row.as_chunks::<LANES>();
    let mut chunks: [&[[f32; LANES]]; T] = [&[]; T];
    for t in 0..T {
        chunks[t] = &tokens[t].as_chunks::<LANES>().0[..row_chunks.len()];
    }
    let mut lanes = [[0.0f32; LANES]; T];
    for (i, row) in row_chunks.iter().enumerate() {
        for t in 0..T {
            let token = &chunks[t][i];
            for lane in 0..LANES {
                lanes[t][lane] += token[lane] * row[lane];
            }
        }
    }
    let start = row_chunks.len() * LANES;
    let mut sums = [0.0; T];
    for t in 0..T {
        let [a, b, c, d, e, f, g, h] = lanes[t];
        sums[t] = ((a + e) + (c + g)) + ((b + f) + (d + h));
        for (x, w) in tokens[t][start..].iter().zip(row_rest) {
            sums[t] += x * w;
        }
    }
    sums
}

/// RMSNorm of each row of `input`.
pub fn rms_norm(input: &[f32], weight: &[f32], eps: f32, output: &mut [f32]) {
    let width = weight.len();
    for (row, out) in input.chunks_exact(width).zip(output.chunks_exact_mut(width)) {
        let scale = (dot(row, row) / width as f32 + eps).sqrt().recip();
        for ((out, x), w) in out.iter_mut().zip(row).zip(weight) {
            *out = x * scale * w;
        }
    }
}

/// Turns scores into weights that sum to one.
pub fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    for score in scores {
        *score /= sum;
    }
}

/// The columns of a row-major matrix from `first` on, as many as the vector has with which each row is combined.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// The whole matrix.
    pub rows: &'a [f32],
    /// The length of a row.
    pub width: usize,
    /// The first of the columns.
    pub first: usize,
}

impl<'a> Columns<'a> {
    fn of_each_row(self, columns: usize) -> impl Iterator<Item = &'a [f32]> {
        self.rows.chunks_exact(self.width).map(move |row| &row[self.first..self.first + columns])
    }
}

/// The attention of a query: adds to `mix` each row of `values`, weighted by the softmax of `scale` times the dot product of
/// the query and the row of `keys` with the same number.
pub fn attend(query: &[f32], scale: f32, keys: Columns<'_>, values: Columns<'_>, mix: &mut [f32]) {
    let mut scores: Vec<f32> = keys.of_each_row(query.len()).map(|key| dot(query, key) * scale).collect();
    softmax(&mut scores);
    for (score, value) in scores.into_iter().zip(values.of_each_row(mix.len())) {
        add_scaled(mix, score, value);
    }
}

/// Computes `gate = silu(gate) * up`.
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

/// Computes `sum += addend`.
pub fn add(sum: &mut [f32], addend: &[f32]) {
    for (sum, addend) in sum.iter_mut().zip(addend) {
        *sum += addend;
    }
}

/// Computes `sum += factor * row`.
pub fn add_scaled(sum: &mut [f32], factor: f32, row: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(row) {
        *sum += factor * x;
    }
}

/// Writes the values in little-endian order. `bytes` has four for each of them.
pub fn to_le_bytes(values: &[f32], bytes: &mut [u8]) {
    for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *bytes = value.to_le_bytes();
    }
}

/// Reads values in little-endian order. `bytes` has four for each of them.
pub fn from_le_bytes(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

/// Position of the largest element, the first of equals; zero for an empty slice.
pub fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokens_products_do_not_depend_on_how_many_tokens_stand_beside_it() {
        let (inner, outputs, tokens) = (37, 11, 2 * TILE + 1);
        let spread = |i: usize| (i * 40_503 % 65_536) as f32 / 32_768.0 - 1.0;
        let weights: Vec<f32> = (0..inner * outputs).map(spread).collect();
        let input: Vec<f32> = (7..7 + inner * tokens).map(spread).collect();
        let mut together = vec![0.0; outputs * tokens];
        matmul(&input, &weights, inner, &mut together);
        for (t, row) in input.chunks_exact(inner).enumerate() {
            let mut alone = vec![0.0; outputs];
            matmul(row, &weights, inner, &mut alone);
            assert_eq!(alone, together[t * outputs..(t + 1) * outputs]);
        }
        let exact: f64 =
            input[..inner].iter().zip(&weights[..inner]).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
        assert!((f64::from(together[0]) - exact).abs() < 1e-5);
    }

    #[test]
    fn attention_reads_its_own_columns_of_keys_and_values() {
        // In each of two rows: a column of another head, the two of this head, and one more.
        let keys = [9.0, 1.0, 0.0, 7.0, 9.0, 0.0, 2.0, 7.0];
        let values = [9.0, 10.0, 20.0, 7.0, 9.0, 30.0, 40.0, 7.0];
        let of = |rows| Columns { rows, width: 4, first: 1 };
        let mut mix = [0.0; 2];
        attend(&[1.0, 1.0], 0.5, of(&keys), of(&values), &mut mix);
        // Scores of 1/2 and 1.
        let second = 1.0 / (1.0 + (-0.5f32).exp());
        let expected = [10.0 + 20.0 * second, 20.0 + 20.0 * second];
        assert!(mix.iter().zip(expected).all(|(is, must)| (is - must).abs() < 1e-4), "{mix:?}");
    }

    #[test]
    fn values_come_back_from_their_little_endian_bytes() {
        let (values, mut bytes, mut back) = ([1.5, -0.0, f32::MIN_POSITIVE], [0; 12], [0.0; 3]);
        to_le_bytes(&values, &mut bytes);
        assert_eq!(bytes[..4], 1.5f32.to_le_bytes());
        from_le_bytes(&bytes, &mut back);
        assert_eq!(back.map(f32::to_bits), values.map(f32::to_bits));
    }

    #[test]
    fn softmax_sums_to_one_and_survives_large_scores() {
        let mut scores = [1000.0, 1001.0, 999.0];
        softmax(&mut scores);
        assert!((scores.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(argmax(&scores), 1);
    }
}
