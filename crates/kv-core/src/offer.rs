//! Which transport and which service of a rank a machine can use. The rules are the same for every
//! service.
//!
//! Matching is a pure function of both sides' words. A transport fits by name and version. A
//! service fits by name, compatibility text and a common version, and the highest common version is
//! spoken. If two offers of one rank fit, the rank is refused, because the two ends of a
//! conversation could choose differently.

use std::ops::RangeInclusive;

use crate::error::Mismatch;
use crate::error::peer::cut;
use crate::id::WorkerId;
use crate::meter::each;
use crate::record::{RankRecord, ServiceOffer, TransportOffer};

/// What a machine looks for in a rank record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// The transport's name, and the version of the form of its metadata.
    pub transport: (&'a str, u16),
    /// The name of the service, as in [`ServiceOffer::service`].
    pub service: &'a str,
    /// The versions of the service's protocol that the machine speaks.
    pub versions: RangeInclusive<u16>,
    /// The compatibility text that the other side must have, too.
    pub compatibility: &'a str,
}

/// The one transport and the one service of a record that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen<'a> {
    /// The transport by which the rank is reached.
    pub transport: &'a TransportOffer,
    /// The offer of the service that was asked for.
    pub offer: &'a ServiceOffer,
    /// The highest version of the service's protocol that both sides speak.
    pub version: u16,
}

/// Why a rank cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// No offer of the rank fits. Configure both sides alike, or run versions that overlap.
    #[error(transparent)]
    Differs(#[from] Mismatch),
    /// Two offers of the rank fit. Remove one of them from the rank's configuration.
    #[error("{worker} has two offers that fit: {first} and {second}")]
    Ambiguous {
        /// The rank that has two offers.
        worker: WorkerId,
        /// The first offer in the rank's record that fits.
        first: String,
        /// The second offer in the rank's record that fits.
        second: String,
    },
}

impl Wanted<'_> {
    /// The transport and the service of a rank that fit. Fails unless exactly one of each does.
    pub fn choose<'a>(&self, rank: &'a RankRecord) -> Result<Chosen<'a>, OfferError> {
        let mut transports = each(&rank.transports).filter(|transport| self.takes(transport));
        let transport = only(rank, &mut transports, name_transport)?.ok_or_else(|| {
            let ours = named(self.transport.0, self.transport.1);
            mismatch("transport", ours, list(&rank.transports, name_transport))
        })?;
        let mut offers = each(&rank.offers).filter(|offer| self.common(offer).is_some());
        let offer = only(rank, &mut offers, name_offer)?.ok_or_else(|| self.missing_service(rank))?;
        let version = self.common(offer).unwrap_or(offer.max);
        Ok(Chosen { transport, offer, version })
    }

    fn takes(&self, transport: &TransportOffer) -> bool {
        (transport.name.as_str(), transport.version) == self.transport
    }

    /// The highest version that both sides speak, if name and compatibility text fit.
    fn common(&self, offer: &ServiceOffer) -> Option<u16> {
        let same = offer.service == self.service && offer.compatibility == self.compatibility;
        let highest = offer.max.min(*self.versions.end());
        (same && highest >= offer.min && highest >= *self.versions.start()).then_some(highest)
    }

    /// The first of name, compatibility and versions in which no offer agrees.
    fn missing_service(&self, rank: &RankRecord) -> OfferError {
        let named: Vec<&ServiceOffer> =
            each(&rank.offers).filter(|offer| offer.service == self.service).collect();
        if named.is_empty() {
            return mismatch("service", self.service.to_owned(), list(&rank.offers, name_offer));
        }
        if named.iter().all(|offer| offer.compatibility != self.compatibility) {
            let theirs = list(named, |offer| format!("{:?}", offer.compatibility));
            return mismatch("compatibility", format!("{:?}", self.compatibility), theirs);
        }
        let ours = versions(*self.versions.start(), *self.versions.end());
        mismatch("version", format!("{} {ours}", self.service), list(named, name_offer))
    }
}

/// The only item; an error that names the first two if there are more.
fn only<'a, T>(
    rank: &RankRecord,
    found: &mut dyn Iterator<Item = &'a T>,
    name: fn(&T) -> String,
) -> Result<Option<&'a T>, OfferError> {
    let first = found.next();
    if let (Some(first), Some(second)) = (first, found.next()) {
        let (first, second) = (name(first), name(second));
        return Err(OfferError::Ambiguous { worker: rank.worker.clone(), first, second });
    }
    Ok(first)
}

fn name_transport(transport: &TransportOffer) -> String {
    named(&transport.name, transport.version)
}

fn named(transport: &str, version: u16) -> String {
    format!("{transport} version {version}")
}

fn name_offer(offer: &ServiceOffer) -> String {
    format!("{} {}", offer.service, versions(offer.min, offer.max))
}

fn versions(min: u16, max: u16) -> String {
    if min == max { format!("version {min}") } else { format!("versions {min} to {max}") }
}

fn list<'a, T: 'a>(items: impl IntoIterator<Item = &'a T>, name: impl Fn(&T) -> String) -> String {
    let names: Vec<String> = items.into_iter().map(name).collect();
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

fn mismatch(field: &str, ours: String, theirs: String) -> OfferError {
    let theirs = cut(theirs);
    OfferError::Differs(Mismatch { field: field.to_owned(), ours, theirs })
}

#[cfg(test)]
mod tests;
