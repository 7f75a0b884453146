#include "pool.h"

#include <algorithm>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vismoe {

namespace {
// A thread that sleeps is some 50 microseconds late for the next job, which is as long as a small one takes. So it spins after a
// job: long where jobs have followed each other closely, as the layers of a token do, otherwise only a moment, since then the core
// is wanted for other things.
constexpr std::chrono::microseconds kSpin{20}, kLongSpin{200};
// After `rouse`: as long as a device takes for attention, and the host for queueing copies, before the job is known.
constexpr std::chrono::microseconds kAwake{800};

// Between two looks of a thread that has waited for a while: whoever shares the core's other half goes on meanwhile.
constexpr int kPauses = 8;

using Clock = std::chrono::steady_clock;

template <class F>
bool spin(F reached, Clock::time_point until, int pauses = 1) {
  while (!reached()) {
    if (Clock::now() >= until) return false;
    for (int i = 0; i < pauses; i++) pause_core();
  }
  return true;
}
}  // namespace

void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

Pool::Pool(std::size_t threads) {
  try {
    for (std::size_t thread = 1; thread < threads; thread++) {
      workers_.emplace_back([this, thread] { serve(thread); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    jobs_++;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Work work, void* job) {
  begin(work, job);
  work(job, 0);
  finish();
}

void Pool::begin(Work work, void* job) {
  if (workers_.empty()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = work;
    job_ = job;
    jobs_++;
  }
  wake_.notify_all();
}

void Pool::finish() {
  if (workers_.empty()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = nullptr;  // a worker that wakes up now takes no part in this job
  }
  if (spin([this] { return busy_ == 0; }, Clock::now() + kLongSpin)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
}

void Pool::rouse() {
  if (workers_.empty()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    awake_until_ = Clock::now() + kAwake;
    jobs_++;
  }
  wake_.notify_all();
}

void Pool::serve(std::size_t thread) {
  std::size_t seen = 0;
  bool soon = false;  // the latest job came soon after the one before it
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    seen = jobs_;
    if (work_ != nullptr) {
      const Work work = work_;
      void* job = job_;
      busy_++;
      lock.unlock();
      work(job, thread);
      lock.lock();
      idle_since_ = Clock::now();
      if (--busy_ == 0) done_.notify_one();
    }
    const auto awake_until = awake_until_;
    lock.unlock();
    const auto ended = Clock::now();
    const auto another = [&] { return jobs_ != seen; };
    const auto until = std::max(awake_until, ended + (soon ? kLongSpin : kSpin));
    spin(another, ended + kSpin) || spin(another, until, kPauses);
    lock.lock();
    wake_.wait(lock, another);  // also for a job that has ended by now: the next one may come soon
    soon = Clock::now() - ended < kLongSpin;
  }
}

}  // namespace vismoe
