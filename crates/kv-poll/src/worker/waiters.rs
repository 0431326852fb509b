//! The tasks of async executors that wait for a change.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Tasks that wait for one thing to change. A change without a waiting task costs one load.
///
/// A task registers and then looks at the thing; the side that changes the thing changes it and then wakes. Both
/// halves of each are sequentially consistent, so that the task sees the change or is woken.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// True while a task is registered.
    any: AtomicBool,
    tasks: Mutex<Tasks>,
}

#[derive(Debug, Default)]
struct Tasks {
    next: u64,
    wakers: BTreeMap<u64, Waker>,
}

impl Waiters {
    /// Wakes every registered task. Comes after the change. A task that is woken registers again if the task
    /// goes on waiting. A waker that panics wakes nobody, and harms neither the caller nor other tasks.
    pub(crate) fn wake(&self) {
        if !self.any.load(Ordering::SeqCst) {
            return;
        }
        let woken = {
            let mut tasks = self.lock();
            self.any.store(false, Ordering::SeqCst);
            std::mem::take(&mut tasks.wakers)
        };
        // The lock is released: a waker may run code of the executor.
        wake_all(later(woken.into_values().collect()));
    }

    fn lock(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wake_all(woken: Vec<Waker>) {
    for waker in woken {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
            // Dropping the payload could panic, too.
            std::mem::forget(payload);
        }
    }
}

thread_local! {
    /// The tasks that this thread is to wake, if it is to wake them later.
    static LATER: RefCell<Option<Vec<Waker>>> = const { RefCell::new(None) };
}

/// Keeps these for later, if this thread is to wake tasks later; otherwise they are returned.
fn later(woken: Vec<Waker>) -> Vec<Waker> {
    let mut woken = Some(woken);
    let keep = |later: &RefCell<Option<Vec<Waker>>>| {
        if let Some(kept) = later.borrow_mut().as_mut() {
            kept.extend(woken.take().into_iter().flatten());
        }
    };
    // A thread that is about to end keeps nothing.
    let _ = LATER.try_with(keep);
    woken.unwrap_or_default()
}

/// While this lives, its thread wakes no task; the tasks are woken when this is dropped. For calls that change
/// sessions under a lock that the code of an executor may take. Of several, the first one counts.
#[derive(Debug)]
pub(crate) struct WakesLater {
    first: bool,
    /// The tasks belong to the thread.
    _thread: PhantomData<*const ()>,
}

impl WakesLater {
    pub(crate) fn begin() -> WakesLater {
        let begin = |later: &RefCell<Option<Vec<Waker>>>| {
            let mut later = later.borrow_mut();
            let first = later.is_none();
            later.get_or_insert_default();
            first
        };
        WakesLater { first: LATER.try_with(begin).unwrap_or(false), _thread: PhantomData }
    }
}

impl Drop for WakesLater {
    fn drop(&mut self) {
        if self.first {
            let woken = LATER.try_with(RefCell::take).ok().flatten();
            wake_all(woken.unwrap_or_default());
        }
    }
}

/// What tasks can wait for.
pub(crate) trait Awaited: Send + Sync {
    fn waiters(&self) -> &Waiters;
}

/// The registrations of one future with the sessions that it waits for, which end when the future is dropped. For the
/// futures that a service makes of its [`Handle`](super::Handle)s; registrations with several handles are collected
/// into one.
///
/// ```
/// use std::future::{Future, poll_fn};
/// use std::task::Poll;
///
/// use kv_core::machine::{Machine, SessionStatus};
/// use kv_poll::worker::Handle;
///
/// /// Resolves with the final state of a session.
/// fn ended<M: Machine + 'static>(handle: &Handle<M>) -> impl Future<Output = M::Status> {
///     let mut waiting = handle.waiting();
///     poll_fn(move |cx| {
///         waiting.look(cx, || match handle.poll() {
///             status if status.is_terminal() => Poll::Ready(status),
///             _ => Poll::Pending,
///         })
///     })
/// }
/// ```
pub struct Waiting(Vec<(Arc<dyn Awaited>, Option<u64>)>);

impl Waiting {
    /// Registrations with these things, for a change of any of them. Nothing is registered yet.
    pub(crate) fn on(things: impl IntoIterator<Item = Arc<dyn Awaited>>) -> Waiting {
        Waiting(things.into_iter().map(|thing| (thing, None)).collect())
    }

    /// Looks, and looks again after the task was registered: a change between both looks is seen by the second one,
    /// and a later change wakes the task. A future that resolves at the first look registers nothing.
    pub fn look<T>(&mut self, cx: &Context<'_>, mut look: impl FnMut() -> Poll<T>) -> Poll<T> {
        match look() {
            Poll::Pending => {
                self.register(cx.waker());
                look()
            }
            ready => ready,
        }
    }

    /// Has the task woken at the next change. Comes before the look at what is awaited.
    fn register(&mut self, waker: &Waker) {
        for (thing, ticket) in &mut self.0 {
            let waiters = thing.waiters();
            // Cloned before the lock and dropped after the lock: a waker is the executor's code, and may drop a task
            // that waits for the same thing.
            let fresh = waker.clone();
            let replaced = {
                let mut tasks = waiters.lock();
                let ticket = *ticket.get_or_insert_with(|| {
                    tasks.next += 1;
                    tasks.next
                });
                waiters.any.store(true, Ordering::SeqCst);
                tasks.wakers.insert(ticket, fresh)
            };
            drop(replaced);
        }
    }
}

impl FromIterator<Waiting> for Waiting {
    fn from_iter<I: IntoIterator<Item = Waiting>>(all: I) -> Waiting {
        Waiting(all.into_iter().flat_map(|mut waiting| std::mem::take(&mut waiting.0)).collect())
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiting").field("on", &self.0.len()).finish_non_exhaustive()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        for (thing, ticket) in &self.0 {
            let Some(ticket) = ticket else { continue };
            // Dropped after the lock: a waker is the executor's code.
            let gone = thing.waiters().lock().wakers.remove(ticket);
            drop(gone);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    #[derive(Default)]
    struct Thing {
        waiters: Waiters,
        value: AtomicUsize,
    }

    impl Awaited for Thing {
        fn waiters(&self) -> &Waiters {
            &self.waiters
        }
    }

    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a bug in the executor");
        }
    }

    fn waiting(thing: &Arc<Thing>) -> Waiting {
        Waiting::on([Arc::clone(thing) as Arc<dyn Awaited>])
    }

    #[test]
    fn a_task_is_woken_once_per_registration_and_not_after_its_future_is_dropped() {
        let (thing, task) = (Arc::<Thing>::default(), Arc::<Task>::default());
        let waker = Waker::from(Arc::clone(&task));
        let mut first = waiting(&thing);
        first.register(&waker);
        first.register(&waker);
        thing.waiters.wake();
        thing.waiters.wake();
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
        first.register(&waker);
        drop(first);
        thing.waiters.wake();
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
        assert_eq!(thing.waiters.lock().wakers.len(), 0, "dropped futures leave nothing behind");
        drop(waker);
        assert_eq!(Arc::strong_count(&task), 1, "no waker is kept");
    }

    #[test]
    fn a_waker_that_panics_keeps_no_other_task_from_being_woken() {
        let (thing, task) = (Arc::<Thing>::default(), Arc::<Task>::default());
        let (mut bad, mut good) = (waiting(&thing), waiting(&thing));
        bad.register(&Waker::from(Arc::new(Panics)));
        good.register(&Waker::from(Arc::clone(&task)));
        thing.waiters.wake();
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_waker_that_panics_with_a_value_that_panics_harms_nobody_either() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("the value of a panic panics");
            }
        }
        struct PanicsTwice;
        impl Wake for PanicsTwice {
            fn wake(self: Arc<Self>) {
                std::panic::panic_any(Bomb);
            }
        }
        let (thing, task) = (Arc::<Thing>::default(), Arc::<Task>::default());
        let (mut bad, mut good) = (waiting(&thing), waiting(&thing));
        bad.register(&Waker::from(Arc::new(PanicsTwice)));
        good.register(&Waker::from(Arc::clone(&task)));
        thing.waiters.wake();
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
    }

    /// A future may move to another task, and the waker of the first one may be the last that keeps that task, which
    /// may wait for the same thing.
    #[test]
    fn a_waker_whose_drop_drops_a_task_that_waits_finds_no_lock_held() {
        struct Owns(Mutex<Option<Waiting>>, Arc<Thing>, Arc<AtomicUsize>);
        impl Wake for Owns {
            fn wake(self: Arc<Self>) {}
        }
        impl Drop for Owns {
            fn drop(&mut self) {
                // Asked before, so that a lock that is held fails the test and does not stop it.
                let free = self.1.waiters.tasks.try_lock().is_ok();
                self.2.fetch_add(if free { 1 } else { 100 }, Ordering::SeqCst);
                let inner = self.0.lock().unwrap().take();
                if free { drop(inner) } else { std::mem::forget(inner) }
            }
        }
        let (thing, dropped) = (Arc::<Thing>::default(), Arc::<AtomicUsize>::default());
        let mut inner = waiting(&thing);
        inner.register(Waker::noop());
        let owner = Arc::new(Owns(Mutex::new(Some(inner)), Arc::clone(&thing), Arc::clone(&dropped)));
        let mut moved = waiting(&thing);
        moved.register(&Waker::from(owner));
        assert_eq!(dropped.load(Ordering::SeqCst), 0);
        moved.register(Waker::noop());
        assert_eq!(dropped.load(Ordering::SeqCst), 1, "dropped once, with no lock held");
        assert_eq!(thing.waiters.lock().wakers.len(), 1);
    }

    /// The task sleeps unless it was woken, and each change is made only after the task has seen the former one, so
    /// that no later wake-up makes good a lost one.
    #[test]
    fn no_wake_up_is_lost_between_a_change_and_a_task_that_falls_asleep() {
        const CHANGES: usize = 20_000;
        struct Unpark(thread::Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let (thing, seen) = (Arc::<Thing>::default(), Arc::new(AtomicUsize::new(0)));
        let changer = {
            let (thing, seen) = (Arc::clone(&thing), Arc::clone(&seen));
            thread::spawn(move || {
                for change in 1..=CHANGES {
                    for _ in 0..change % 397 {
                        std::hint::spin_loop();
                    }
                    thing.value.store(change, Ordering::SeqCst);
                    thing.waiters.wake();
                    while seen.load(Ordering::Acquire) < change {
                        thread::yield_now();
                    }
                }
            })
        };
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        for change in 1..=CHANGES {
            let mut waiting = waiting(&thing);
            loop {
                let changed = || match thing.value.load(Ordering::SeqCst) >= change {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                };
                if waiting.look(&Context::from_waker(&waker), changed).is_ready() {
                    break;
                }
                let start = Instant::now();
                thread::park_timeout(Duration::from_secs(20));
                assert!(start.elapsed() < Duration::from_secs(20), "asleep before change {change}");
            }
            seen.store(change, Ordering::Release);
        }
        changer.join().unwrap();
    }

    /// Nobody wakes a task for a change that was made before the task was registered.
    #[test]
    fn a_change_between_the_look_and_the_registration_is_seen_at_once() {
        let (mut waiting, mut looks) = (Waiting::on([]), 0);
        let poll = waiting.look(&Context::from_waker(Waker::noop()), || {
            looks += 1;
            if looks == 1 { Poll::Pending } else { Poll::Ready(()) }
        });
        assert!(poll.is_ready());
    }
}
