//! What a dialect does not have is refused, with the option and the dialect, before anything starts.

use super::{Dialect, DialectOptions};
use crate::cli::{CacheOptions, HandOver, Mode, PageLayout, Parallelism, TransportKind};
use crate::error::ExampleError;
use crate::rank::RankSpec;
use crate::router::Side;

impl RankSpec {
    /// Refuses options that do not exist in the dialect of the rank.
    pub fn check_dialect(&self) -> Result<(), ExampleError> {
        self.dialect.check(self.side, &self.cache, &self.hand_over, self.parallelism)
    }
}

impl DialectOptions {
    /// Refuses options that do not exist in this dialect.
    ///
    /// # Errors
    ///
    /// [`ExampleError::NotBuilt`] in a build without the feature `interop`; [`ExampleError::NotInDialect`] with the
    /// option, its value, and what would do.
    pub fn check(
        &self,
        side: Side,
        cache: &CacheOptions,
        hand_over: &HandOver,
        parallelism: Parallelism,
    ) -> Result<(), ExampleError> {
        let dialect = self.dialect;
        let refuse =
            |option, got: String, instead| Err(ExampleError::NotInDialect { option, got, dialect, instead });
        if dialect == Dialect::Native {
            return match &self.side_channel {
                Some(addr) => refuse("side-channel", addr.clone(), "--bootstrap"),
                None => Ok(()),
            };
        }
        if !cfg!(feature = "interop") {
            return Err(ExampleError::NotBuilt { feature: "nixl,interop" });
        }
        if cache.transport != TransportKind::Nixl {
            return refuse("transport", format!("{:?}", cache.transport).to_lowercase(), "--transport nixl");
        }
        for (option, size) in [("pp", parallelism.pp), ("cp", parallelism.cp), ("dcp", parallelism.dcp)] {
            if size > 1 {
                return refuse(option, size.to_string(), "--tp");
            }
        }
        let mode = format!("{:?}", hand_over.mode).to_lowercase();
        if dialect == Dialect::Vllm {
            // vLLM reads the memory of a prefill rank, and asks for the memory of a decode rank in order to write.
            let read_by_vllm = side == Side::Prefill || hand_over.mode == Mode::Push;
            return match (hand_over.mode, cache.layout) {
                (Mode::Auto, _) => refuse("mode", mode, "--mode pull or --mode push"),
                (_, PageLayout::Packed) => Ok(()),
                (_, other) if read_by_vllm => refuse("layout", name(other), "--layout packed"),
                _ => Ok(()),
            };
        }
        let leases = [("lease-seconds", hand_over.lease_seconds), ("kept-seconds", hand_over.kept_seconds)];
        match (hand_over.mode, cache.layout, leases) {
            (Mode::Pull | Mode::Auto, ..) => refuse("mode", mode, "--mode push"),
            (_, PageLayout::LayerMajor, [(_, None), (_, None)]) => Ok(()),
            (_, _, [(option, Some(seconds)), _] | [_, (option, Some(seconds))]) => {
                refuse(option, seconds.to_string(), "--deadline")
            }
            (_, other, _) => refuse("layout", name(other), "--layout layer-major"),
        }
    }
}

/// The name of a layout on the command line.
fn name(layout: PageLayout) -> String {
    use clap::ValueEnum;
    layout.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Options {
        #[command(flatten)]
        dialect: DialectOptions,
        #[command(flatten)]
        cache: CacheOptions,
        #[command(flatten)]
        parallelism: Parallelism,
        #[command(flatten)]
        hand_over: HandOver,
    }

    fn check(side: Side, line: &str) -> Result<(), String> {
        let Options { dialect, cache, parallelism, hand_over } =
            Options::parse_from(std::iter::once("example").chain(line.split_whitespace()));
        dialect.check(side, &cache, &hand_over, parallelism).map_err(|error| error.to_string())
    }

    #[test]
    fn native_ranks_take_every_option_but_the_side_channel() {
        let line = "--mode auto --layout page-major --tp 2 --pp 2 --lease-seconds 3";
        assert_eq!(check(Side::Prefill, line), Ok(()));
        let refused = check(Side::Prefill, "--side-channel 127.0.0.1:1").unwrap_err();
        assert_eq!(
            refused,
            "--side-channel 127.0.0.1:1 does not exist in --dialect native: use --bootstrap instead"
        );
    }

    #[cfg(not(feature = "interop"))]
    #[test]
    fn a_build_without_the_features_names_both() {
        for dialect in ["vllm", "sglang"] {
            let refused = check(Side::Decode, &format!("--dialect {dialect}")).unwrap_err();
            assert!(refused.contains("without feature `nixl,interop`"), "{refused}");
        }
    }

    #[cfg(feature = "interop")]
    #[test]
    fn what_a_dialect_does_not_have_is_refused_by_option_and_dialect() {
        let (prefill, decode) = (Side::Prefill, Side::Decode);
        for (side, line) in [
            (prefill, "--dialect vllm"),
            (decode, "--dialect vllm --mode push --tp 2 --lease-seconds 3"),
            (decode, "--dialect vllm --layout page-major"),
            (prefill, "--dialect sglang --side-channel 127.0.0.1:0"),
            (decode, "--dialect sglang --tp 2 --timing fast"),
        ] {
            assert_eq!(check(side, line), Ok(()), "{side}: {line}");
        }
        for (side, line, refused, instead) in [
            (prefill, "--dialect vllm --mode auto", "--mode auto", "--mode pull or --mode push"),
            (prefill, "--dialect vllm --layout head-major", "--layout head-major", "--layout packed"),
            (
                decode,
                "--dialect vllm --mode push --layout layer-major",
                "--layout layer-major",
                "--layout packed",
            ),
            (decode, "--dialect vllm --transport local", "--transport local", "--transport nixl"),
            (decode, "--dialect vllm --pp 2", "--pp 2", "--tp"),
            (decode, "--dialect sglang --cp 3", "--cp 3", "--tp"),
            (prefill, "--dialect sglang --dcp 4", "--dcp 4", "--tp"),
            (prefill, "--dialect sglang --mode pull", "--mode pull", "--mode push"),
            (prefill, "--dialect sglang --mode auto", "--mode auto", "--mode push"),
            (prefill, "--dialect sglang --layout packed", "--layout packed", "--layout layer-major"),
            (prefill, "--dialect sglang --lease-seconds 9", "--lease-seconds 9", "--deadline"),
            (decode, "--dialect sglang --kept-seconds 8", "--kept-seconds 8", "--deadline"),
        ] {
            let dialect = if line.contains("vllm") { "vllm" } else { "sglang" };
            let text = format!("{refused} does not exist in --dialect {dialect}: use {instead} instead");
            assert_eq!(check(side, line), Err(text), "{line}");
        }
    }
}
