// The compute threads of this process. The caller of `run` takes part; the other threads sleep between jobs.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace vismoe {

class Pool {
 public:
  // Work of one job: thread 0 is the caller's own. It returns when nothing is left to claim.
  using Work = void (*)(void* job, std::size_t thread);

  explicit Pool(std::size_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::size_t threads() const { return workers_.size() + 1; }
  // Calls work(job, thread) here and in every worker that wakes up in time; returns when all started calls have returned.
  void run(Work work, void* job);
  // The same in steps: `begin` returns at once, and whoever calls `finish` has done what is left.
  void begin(Work work, void* job);
  void finish();
  // Since when none was in a job; after `finish`.
  std::chrono::steady_clock::time_point idle_since() const { return idle_since_; }
  // Whether a worker is in a job.
  bool working() const { return busy_ > 0; }
  // Wakes the workers, which then spin for a while: the next job comes soon.
  void rouse();

 private:
  void serve(std::size_t thread);
  void stop();

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Work work_ = nullptr;  // not null while a job takes workers
  void* job_ = nullptr;
  std::atomic<std::size_t> busy_{0};  // workers in the job; changes under the mutex
  bool stop_ = false;
  std::chrono::steady_clock::time_point awake_until_{}, idle_since_{};
  // Counts jobs, calls of `rouse` and the stop; a worker that has just finished watches it for a while.
  std::atomic<std::size_t> jobs_{0};
};

void pause_core();

// Waits until `reached()`: spins for some microseconds, then yields the core to other threads.
template <class F>
inline void wait_for(F reached) {
  for (int spins = 0; !reached(); spins++) {
    if (spins < 2000) {
      pause_core();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace vismoe
