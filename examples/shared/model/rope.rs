//! Rotary position embedding, with Llama 3's stretched frequencies.

use super::config::ModelConfig;

/// The angles by which the halves of a head are rotated.
#[derive(Debug, Clone)]
pub struct Rope {
    frequencies: Vec<f32>,
}

impl Rope {
    /// The rotary frequencies for `config`.
    pub fn new(config: &ModelConfig) -> Rope {
        let half = config.rope_dim() / 2;
        let plain = (0..half).map(|i| config.rope_theta.powf(-(i as f64) / half as f64));
        let frequencies = plain.map(|frequency| match &config.rope_scaling {
            None => frequency as f32,
            Some(scaling) => {
                // Llama 3.1: short wavelengths stay, long ones are divided by the factor, and
                // those between are blended.
                let wavelength = 2.0 * std::f64::consts::PI / frequency;
                let turns = scaling.original_max_position_embeddings / wavelength;
                let span = scaling.high_freq_factor - scaling.low_freq_factor;
                let keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0);
                (frequency * (keep + (1.0 - keep) / scaling.factor)) as f32
            }
        });
        Rope { frequencies: frequencies.collect() }
    }

    /// Cosine and sine of each frequency at `position`.
    pub fn angles(&self, position: usize) -> Vec<(f32, f32)> {
        self.frequencies
            .iter()
            .map(|frequency| position as f32 * frequency)
            .map(|a| (a.cos(), a.sin()))
            .collect()
    }

    /// Rotates each head of `row`: element `i` of the first half with element `i` of the second.
    pub fn rotate(angles: &[(f32, f32)], row: &mut [f32]) {
        for head in row.chunks_exact_mut(angles.len() * 2) {
            let (first, second) = head.split_at_mut(angles.len());
            for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Llama3Scaling;

    #[test]
    fn llama3_keeps_short_wavelengths_divides_long_ones_and_blends_between() {
        let mut config = ModelConfig { head_dim: 128, rope_theta: 500_000.0, ..ModelConfig::small() };
        let plain = Rope::new(&config).frequencies;
        config.rope_scaling = Some(Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        });
        let scaled = Rope::new(&config).frequencies;
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        let ratios: Vec<f32> = scaled.iter().zip(&plain).map(|(s, p)| s / p).collect();
        assert!(ratios.windows(2).all(|pair| pair[0] >= pair[1]), "{ratios:?}");
        assert!(ratios.iter().any(|ratio| *ratio > 0.13 && *ratio < 0.99), "{ratios:?}");
    }

    #[test]
    fn rotation_keeps_the_length_and_makes_products_depend_on_distance_only() {
        let rope = Rope::new(&ModelConfig { head_dim: 4, ..ModelConfig::small() });
        let product = |p: usize, q: usize| {
            let (mut a, mut b) = ([1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 2.0, 1.0]);
            Rope::rotate(&rope.angles(p), &mut a);
            Rope::rotate(&rope.angles(q), &mut b);
            a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>()
        };
        assert!((product(3, 1) - product(12, 10)).abs() < 1e-4);
        assert!((product(3, 1) - product(3, 2)).abs() > 1e-2);
    }
}
