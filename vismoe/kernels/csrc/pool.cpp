#include "pool.h"

#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vismoe {

namespace {
constexpr std::chrono::microseconds kSpin{20};  // spinning after a job, because the next layer's job may come soon
}

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
  if (!workers_.empty()) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = work;
      job_ = job;
      jobs_++;
    }
    wake_.notify_all();
  }
  work(job, 0);
  if (!workers_.empty()) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = nullptr;  // a worker that wakes up now takes no part in this job
    done_.wait(lock, [this] { return busy_ == 0; });
  }
}

void Pool::serve(std::size_t thread) {
  std::size_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    if (work_ != nullptr && jobs_ != seen) {
      const Work work = work_;
      void* job = job_;
      seen = jobs_;
      busy_++;
      lock.unlock();
      work(job, thread);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
    lock.unlock();
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (jobs_ == seen && std::chrono::steady_clock::now() < until) pause_core();
    lock.lock();
    wake_.wait(lock, [&] { return stop_ || (work_ != nullptr && jobs_ != seen); });
  }
}

}  // namespace vismoe
