//! What stands in for TLS in a build without the feature `tls`: there is no configuration, and no session.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use kv_core::Time;
use kv_host::{Memory, OsError};

use crate::inbound::{Inbound, ReceiveError, Received};
use crate::outbound::Outbound;

/// Has no value, because the feature `tls` is off.
#[derive(Debug)]
pub(crate) enum Tls {}

/// Has no value, because the feature `tls` is off.
#[derive(Debug)]
pub(crate) enum Session {}

impl Tls {
    pub(crate) fn dialed(&self, _: IpAddr) -> Result<Session, ()> {
        match *self {}
    }

    pub(crate) fn accepted(&self) -> Result<Session, ()> {
        match *self {}
    }
}

impl Session {
    pub(crate) fn has_shown_a_certificate(&self) -> bool {
        match *self {}
    }

    pub(crate) fn has_unread(&self) -> bool {
        match *self {}
    }

    pub(crate) fn has_unwritten(&self) -> bool {
        match *self {}
    }

    pub(crate) fn tidy(&mut self) {
        match *self {}
    }

    pub(crate) fn receive(
        &mut self,
        _: BorrowedFd<'_>,
        _: &mut Inbound,
        _: &[Memory],
        _: usize,
    ) -> Result<Received, ReceiveError> {
        match *self {}
    }

    pub(crate) fn flush(
        &mut self,
        _: BorrowedFd<'_>,
        _: &mut Outbound,
        _: &[Memory],
        _: (Time, usize),
        _: &mut [u8],
    ) -> Result<(usize, bool), OsError> {
        match *self {}
    }

    pub(crate) fn say_goodbye(&mut self, _: BorrowedFd<'_>) {
        match *self {}
    }
}
