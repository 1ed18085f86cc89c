//! Threads that compute, behind a queue that is not long: what cannot be done in time is refused at once.
//!
//! The threads that talk to clients never compute. A call ends when its time is over, or when its client goes away.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use certk_rs::{CancelToken, Context, Error, Workspace};
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use tokio::sync::oneshot;

use crate::failure::Failure;

type Job = Box<dyn FnOnce() + Send>;

/// The threads; they end when this is dropped and their queue is empty.
pub(crate) struct Compute {
    queue: Sender<Job>,
    /// Scratch of all calls.
    workspace: Workspace,
    memory: usize,
    /// Calls that threads work on.
    at_work: Arc<AtomicUsize>,
}

/// What ends a call: for work that the crate does not do, such as reading files.
pub(crate) struct Watch {
    token: CancelToken,
    deadline: Instant,
}

impl Watch {
    /// Whether to go on; asked between portions of a millisecond at most.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.token.is_cancelled() {
            return Err(Failure::from(Error::Interrupted));
        }
        if Instant::now() >= self.deadline {
            return Err(Failure::from(Error::DeadlineExceeded));
        }
        Ok(())
    }

    /// One that never ends anything.
    pub(crate) fn patient() -> Self {
        let deadline = Instant::now() + Duration::from_secs(365 * 86_400);
        Watch { token: CancelToken::new(), deadline }
    }
}

/// Raises a flag when the request that waits for an answer is dropped.
struct CancelOnDrop(CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Compute {
    pub(crate) fn start(threads: usize, waiting: usize, memory: usize) -> std::io::Result<Self> {
        let (queue, jobs) = bounded::<Job>(waiting);
        for i in 0..threads.max(1) {
            let jobs: Receiver<Job> = jobs.clone();
            let run = move || jobs.into_iter().for_each(|job| job());
            std::thread::Builder::new().name(format!("compute-{i}")).spawn(run)?;
        }
        Ok(Compute { queue, workspace: Workspace::new(), memory, at_work: Arc::default() })
    }

    /// Has a thread do `work` under a context that ends with the time or the request.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        timeout: Duration,
        work: impl FnOnce(&Watch) -> Result<R, Failure> + Send + 'static,
    ) -> Result<R, Failure> {
        self.run_until(Instant::now() + timeout, work).await
    }

    /// The same until a moment.
    pub(crate) async fn run_until<R: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&Watch) -> Result<R, Failure> + Send + 'static,
    ) -> Result<R, Failure> {
        let token = CancelToken::new();
        let _goes_away = CancelOnDrop(token.clone());
        let context = Context::new()
            .serial()
            .cancel(&token)
            .deadline(deadline)
            .memory_limit(self.memory)
            .workspace(&self.workspace);
        let (answer, answered) = oneshot::channel();
        let at_work = Arc::clone(&self.at_work);
        let watch = Watch { token: token.clone(), deadline };
        let job = Box::new(move || {
            if token.is_cancelled() {
                return;
            }
            at_work.fetch_add(1, Ordering::Relaxed);
            let found = if Instant::now() >= deadline {
                Err(Failure::from(Error::DeadlineExceeded))
            } else {
                // No input makes the crate panic; if one does, the service goes on.
                catch_unwind(AssertUnwindSafe(|| context.run(|| work(&watch)))).unwrap_or_else(
                    |_| {
                        let message = "a bug of the service: please report what was asked";
                        Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, message))
                    },
                )
            };
            at_work.fetch_sub(1, Ordering::Relaxed);
            answer.send(found).ok();
        });
        match self.queue.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(Failure::busy()),
            Err(TrySendError::Disconnected(_)) => {
                return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, "the service ends"));
            }
        }
        let late = || Failure::from(Error::DeadlineExceeded);
        // Where all threads are busy for longer, nobody looks at the clock for a call that waits.
        match tokio::time::timeout_at((deadline + Duration::from_millis(20)).into(), answered).await
        {
            Ok(Ok(found)) => found,
            Ok(Err(_)) | Err(_) => Err(late()),
        }
    }

    /// Calls that wait, calls that are worked on, bytes of scratch that lie idle.
    pub(crate) fn gauges(&self) -> (usize, usize, usize) {
        (self.queue.len(), self.at_work.load(Ordering::Relaxed), self.workspace.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::support::until;

    fn endless(_: &Watch) -> Result<(), Failure> {
        let row = vec![1.0_f32; 1 << 16];
        let scores = certk_rs::Scores::new(&row, &[1, 1 << 16])?;
        loop {
            certk_rs::select(&scores, &[0.1], &certk_rs::Options::new())?;
        }
    }

    const LONG: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn too_many_calls_are_refused_and_late_ones_end() {
        let compute = Arc::new(Compute::start(1, 1, 1 << 30).unwrap());
        let call = |timeout| {
            let compute = Arc::clone(&compute);
            tokio::spawn(async move { compute.run(timeout, endless).await })
        };
        let first = call(LONG);
        until(|| compute.gauges().1 == 1).await;
        let waits = call(SHORT);
        until(|| compute.gauges().0 == 1).await;
        let refused = call(LONG).await.unwrap().unwrap_err();
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(waits.await.unwrap().unwrap_err().status, StatusCode::GATEWAY_TIMEOUT);
        first.abort();
        until(|| compute.gauges().0 == 0 && compute.gauges().1 == 0).await;
        let late = call(SHORT).await.unwrap().unwrap_err();
        assert_eq!(late.status, StatusCode::GATEWAY_TIMEOUT);
        until(|| compute.gauges().1 == 0).await;
    }

    #[tokio::test]
    async fn a_call_ends_with_its_request_and_a_panic_ends_no_thread() {
        let compute = Arc::new(Compute::start(1, 4, 1 << 30).unwrap());
        let request = {
            let compute = Arc::clone(&compute);
            tokio::spawn(async move { compute.run(LONG, endless).await })
        };
        until(|| compute.gauges().1 == 1).await;
        request.abort();
        until(|| compute.gauges().1 == 0).await;
        let panic = compute.run(LONG, |_| -> Result<(), Failure> { panic!("as it should be") });
        assert_eq!(panic.await.unwrap_err().status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(compute.run(LONG, |_| Ok(7)).await.unwrap(), 7);
    }
}
