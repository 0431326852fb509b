//! The arithmetic of admission: when the cache has room for another request.

/// The rule by which a request is admitted: how much of the cache must stay free for requests that are
/// already active (SGLang's rule, counted in pages).
///
/// A request is admitted if
///
/// ```text
/// max(pages + reserve,  pages + growth − retractable)  ≤  available − active × reserve
/// ```
///
/// with `reserve` the pages of `reserved_tokens`, `growth` the pages of `max_new_tokens` clipped to
/// `clip_new_tokens`, `active` the number of requests that hold pages, and `retractable` the pages of running
/// requests, if the server retracts them when it runs out of pages. The first term leaves every active
/// request room for its next `reserved_tokens` tokens; the second ensures that the request can finish, if
/// need be alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdmissionRule {
    /// Tokens in a page. With decode context parallelism: tokens in the pages that have the same number on
    /// all ranks.
    pub page_size: u32,
    /// Tokens kept free for each active request (SGLang's `num_reserved_decode_tokens`: 512).
    pub reserved_tokens: u32,
    /// Most new tokens that a request is expected to generate (SGLang's
    /// `SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`: 4096).
    pub clip_new_tokens: u32,
    /// True if the server retracts running requests when it runs out of pages.
    pub retraction: bool,
}

/// How much of the cache a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Demand {
    /// Pages that the request receives from the prefill side.
    pub pages: usize,
    /// Most tokens that the request may generate.
    pub max_new_tokens: u32,
}

impl Demand {
    /// The demand of a request that receives `pages` pages and generates `max_new_tokens` tokens at most.
    pub const fn new(pages: usize, max_new_tokens: u32) -> Demand {
        Demand { pages, max_new_tokens }
    }
}

/// How full the cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Load {
    /// Pages that are free.
    pub available: usize,
    /// Requests that hold pages: in transfer, waiting, or running.
    pub active: usize,
    /// Pages that running requests hold.
    pub running_pages: usize,
}

impl Load {
    /// The same with some fields changed: `Load::default().with(|load| load.available = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

impl AdmissionRule {
    /// SGLang's numbers: 512 tokens reserved, estimates clipped at 4096, running requests retractable.
    pub const fn new(page_size: u32) -> AdmissionRule {
        AdmissionRule { page_size, reserved_tokens: 512, clip_new_tokens: 4096, retraction: true }
    }

    /// How many pages `tokens` tokens take.
    pub fn pages_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.page_size.max(1)) as usize
    }

    /// How many pages are free beyond the reserve of the active requests.
    pub fn headroom(&self, load: &Load) -> usize {
        let reserved = load.active.saturating_mul(self.pages_for(self.reserved_tokens));
        load.available.saturating_sub(reserved)
    }

    /// How many pages of headroom a request needs.
    pub fn need(&self, demand: &Demand, load: &Load) -> usize {
        let reserve = demand.pages.saturating_add(self.pages_for(self.reserved_tokens));
        let growth = self.pages_for(demand.max_new_tokens.min(self.clip_new_tokens));
        let retractable = if self.retraction { load.running_pages } else { 0 };
        reserve.max(demand.pages.saturating_add(growth).saturating_sub(retractable))
    }

    /// How many pages are missing for a new request; zero if the request fits.
    pub fn missing(&self, demand: &Demand, load: &Load) -> usize {
        self.need(demand, load).saturating_sub(self.headroom(load))
    }

    /// How many pages are missing for a retracted request of `pages` pages to go on. The usual reserve is
    /// kept, except when no other request is active: then the request, which ran before, may take all free
    /// pages.
    pub fn missing_to_resume(&self, pages: usize, load: &Load) -> usize {
        if load.active == 0 {
            return pages.saturating_sub(load.available);
        }
        let need = pages.saturating_add(self.pages_for(self.reserved_tokens));
        need.saturating_sub(self.headroom(load))
    }

    /// The same with some fields changed: `AdmissionRule::new(16).with(|rule| rule.retraction = false)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SGLANG: AdmissionRule =
        AdmissionRule { page_size: 16, reserved_tokens: 512, clip_new_tokens: 4096, retraction: true };

    fn load(available: usize, active: usize, running_pages: usize) -> Load {
        Load { available, active, running_pages }
    }

    #[test]
    fn every_active_request_keeps_its_reserve() {
        let demand = Demand { pages: 10, max_new_tokens: 1 };
        // 512 tokens are 32 pages: 10 + 32 for the new one, 3 × 32 for the active ones.
        assert_eq!(SGLANG.missing(&demand, &load(42 + 96, 3, 0)), 0);
        assert_eq!(SGLANG.missing(&demand, &load(42 + 95, 3, 0)), 1);
        assert_eq!(SGLANG.missing(&demand, &load(0, 3, 0)), 42);
    }

    #[test]
    fn a_request_must_be_able_to_finish_when_all_others_are_retracted() {
        let demand = Demand { pages: 10, max_new_tokens: 3200 };
        assert_eq!(SGLANG.need(&demand, &load(0, 1, 0)), 10 + 200);
        assert_eq!(SGLANG.need(&demand, &load(0, 1, 150)), 60);
        assert_eq!(SGLANG.need(&demand, &load(0, 1, 9999)), 42);
        let without = AdmissionRule { retraction: false, ..SGLANG };
        assert_eq!(without.need(&demand, &load(0, 1, 9999)), 210);
    }

    #[test]
    fn estimates_of_new_tokens_are_clipped() {
        let demand = Demand { pages: 0, max_new_tokens: u32::MAX };
        assert_eq!(SGLANG.need(&demand, &load(0, 0, 0)), 256);
    }

    #[test]
    fn absurd_numbers_saturate_instead_of_overflowing() {
        let demand = Demand { pages: usize::MAX, max_new_tokens: u32::MAX };
        assert_eq!(SGLANG.missing(&demand, &load(usize::MAX, usize::MAX, 0)), usize::MAX);
        let rule = AdmissionRule { page_size: 0, ..SGLANG };
        assert_eq!(rule.pages_for(7), 7);
    }

    #[test]
    fn a_retracted_request_that_is_alone_may_take_all_pages() {
        assert_eq!(SGLANG.missing_to_resume(40, &load(40, 0, 0)), 0);
        assert_eq!(SGLANG.missing_to_resume(40, &load(39, 0, 0)), 1);
        assert_eq!(SGLANG.missing_to_resume(40, &load(40 + 32 + 32, 1, 0)), 0);
        assert_eq!(SGLANG.missing_to_resume(40, &load(40 + 32 + 31, 1, 0)), 1);
    }
}
