//! The slope of the resident memory, with its confidence interval.

/// Growth of at least this many KiB a minute is a leak; it is less than a page a second.
const TOLERATED: f64 = 128.0;

/// Samples of the resident memory, over time.
#[derive(Debug, Default)]
pub struct Slope {
    samples: Vec<(f64, f64)>,
}

impl Slope {
    /// Adds a sample.
    pub fn add(&mut self, minutes: f64, kib: f64) {
        self.samples.push((minutes, kib));
    }

    /// Prints the slope and, if the memory grows, the growth for each visitor. False if the memory grows by as
    /// much as a leak would.
    pub fn report(&self, visitors: u64) -> bool {
        let Some((slope, half)) = self.fit() else {
            println!("too few samples to tell whether the memory grows");
            return true;
        };
        let (low, high) = (slope - half, slope + half);
        println!("RSS slope {slope:+.1} KiB/min, 95 % confidence interval {low:+.1} to {high:+.1}");
        let flat = low <= 0.0;
        if flat {
            println!("the memory does not grow: the slope cannot be told from 0, or is negative");
        } else if visitors > 0 {
            let minutes = self.samples.last().map_or(0.0, |sample| sample.0);
            println!(
                "the memory grows: by {:.0} bytes for each visitor",
                slope * minutes * 1024.0 / visitors as f64
            );
        } else {
            println!("the memory grows");
        }
        flat || slope < TOLERATED
    }

    /// Slope by least squares and half of its confidence interval. Neighbouring samples resemble each
    /// other, so that they count for fewer: n (1 - r) / (1 + r) with the correlation r of neighbours.
    fn fit(&self) -> Option<(f64, f64)> {
        let n = self.samples.len() as f64;
        if n < 5.0 {
            return None;
        }
        let mean = |value: fn(&(f64, f64)) -> f64| self.samples.iter().map(value).sum::<f64>() / n;
        let (x, y) = (mean(|sample| sample.0), mean(|sample| sample.1));
        let spread: f64 = self.samples.iter().map(|sample| (sample.0 - x).powi(2)).sum();
        let slope = self.samples.iter().map(|sample| (sample.0 - x) * (sample.1 - y)).sum::<f64>() / spread;
        let rest: Vec<f64> =
            self.samples.iter().map(|sample| sample.1 - y - slope * (sample.0 - x)).collect();
        let squares: f64 = rest.iter().map(|rest| rest * rest).sum();
        let neighbours: f64 = rest.iter().zip(rest.iter().skip(1)).map(|(one, next)| one * next).sum();
        let r = if squares > 0.0 { (neighbours / squares).clamp(0.0, 0.95) } else { 0.0 };
        let counted = (n * (1.0 - r) / (1.0 + r)).max(4.0);
        let error = (squares / (counted - 2.0) / (spread * counted / n)).sqrt();
        // Student's t for 95 %, from above: 2.8 at 4 degrees of freedom, 2.0 at 60.
        let t = 1.96 + 2.8 / (counted - 2.0).max(1.0);
        Some((slope, t * error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slope_distinguishes_a_leak_from_noise() {
        let noise = |at: usize| f64::from((at as u32).wrapping_mul(2_654_435_761) >> 20);
        let (mut flat, mut grows) = (Slope::default(), Slope::default());
        for at in 0..60 {
            let minutes = at as f64 / 6.0;
            flat.add(minutes, 50_000.0 + noise(at));
            grows.add(minutes, 50_000.0 + noise(at) + 2000.0 * minutes);
        }
        assert!(flat.report(0));
        assert!(!grows.report(0));
        assert!((grows.fit().unwrap().0 - flat.fit().unwrap().0 - 2000.0).abs() < 1e-6);
    }
}
