// The C interface of the expert kernels: one call computes all experts of a layer, one linear, or one sum of parts.
//
// A call is cut into tasks that are claimed in order: packing inputs, then up and activation of every expert, then down. A task
// waits only for earlier ones, of its own expert where it can, so the threads meet no barrier. Calls from several threads take
// turns.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace vismoe {
namespace {

constexpr std::size_t kTaskBytes = 256 * 1024;   // weights of one task, at most: some microseconds
constexpr std::size_t kLeastBytes = 32 * 1024;   // the same, at least
constexpr std::size_t kTasksOfThread = 32;       // wanted, so that threads end together
constexpr std::size_t kAloneBytes = 128 * 1024;  // less than this is read before another thread has woken up
constexpr std::size_t kPackBytes = 256 * 1024;   // inputs of one packing task

enum Stage { kPack, kUp, kDown, kProduct, kCombine };

struct Task {
  Stage stage;
  std::size_t expert;      // of kUp and kDown; a kDown that adds takes all experts, one after the other
  std::size_t begin, end;  // pairs of kPack, tokens of kCombine, outputs otherwise
};

std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }

// ------------------------------------------------------------------ the process's threads and workspace
struct State {
  std::mutex mutex;  // one call at a time
  std::size_t threads = 1;
  Isa isa = kPortable;
  std::unique_ptr<Pool> pool;
  std::uint8_t* workspace = nullptr;  // grows and is kept, like all below
  std::size_t workspace_bytes = 0;
  std::vector<Task> tasks;
  std::unique_ptr<std::atomic<std::size_t>[]> up_left;
  std::size_t up_left_size = 0;
  std::vector<std::int32_t> rows, row_starts;  // of combine

  Pool& started_pool() {
    if (!pool) pool = std::make_unique<Pool>(threads);
    return *pool;
  }

  void free_workspace() {
    std::free(workspace);
    workspace = nullptr;
    workspace_bytes = 0;
  }

  std::uint8_t* workspace_of(std::size_t bytes) {
    if (bytes > workspace_bytes) {
      free_workspace();
      workspace = static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, round_up(bytes, kAlignment)));
      if (workspace == nullptr) throw std::bad_alloc();
      workspace_bytes = bytes;
    }
    return workspace;
  }

  std::atomic<std::size_t>* up_left_of(std::size_t experts) {
    if (experts > up_left_size) {
      up_left.reset(new std::atomic<std::size_t>[experts]);
      up_left_size = experts;
    }
    return up_left.get();
  }
};

State* state = nullptr;

// A forked child has none of its parent's threads, and perhaps a lock that nobody will open: it begins anew, with the same
// settings.
void begin_anew() {
  State* fresh = new State;
  fresh->threads = state->threads;
  fresh->isa = state->isa;
  state = fresh;
}

State& the_state() {
  static std::once_flag once;
  std::call_once(once, [] {
    state = new State;
    pthread_atfork(nullptr, nullptr, begin_anew);
  });
  return *state;
}

const Kernels& kernels_for(Isa isa, Dtype x, std::int32_t encoding) {
#if defined(__x86_64__)
  if (isa == kAvx512Bf16 && x == kBf16 && encoding != kRawFp16) return kernels_avx512bf16();
  if (isa >= kAvx512) return kernels_avx512();
  if (isa == kAvx2) return kernels_avx2();
#endif
  static_cast<void>(isa), static_cast<void>(x), static_cast<void>(encoding);
  return kernels_portable();
}

// ------------------------------------------------------------------ jobs
class Job {
 public:
  Job(State& s, std::size_t bytes)
      : tasks_(s.tasks), bytes_(bytes), task_bytes_(std::clamp(bytes / (kTasksOfThread * s.threads), kLeastBytes, kTaskBytes)) {
    tasks_.clear();
  }
  virtual ~Job() = default;

  // Runs all tasks, by this thread alone where they read fewer than kAloneBytes.
  void run_all(State& s) {
    if (bytes_ < kAloneBytes) return work(0);
    s.started_pool().run([](void* job, std::size_t thread) { static_cast<Job*>(job)->work(thread); }, this);
  }

 protected:
  // `next` is the task that this thread runs afterwards, or null.
  virtual void run(const Task& task, const Task* next, std::size_t thread) = 0;

  void add(Stage stage, std::size_t begin, std::size_t end, std::size_t expert = 0) {
    tasks_.push_back({stage, expert, begin, end});
  }

  // Tasks for `outputs` outputs; returns how many.
  std::size_t cut(Stage stage, std::size_t outputs, std::size_t bytes_of_one, std::size_t expert = 0) {
    const std::size_t fitting = task_bytes_ / std::max<std::size_t>(bytes_of_one, 1) / 16 * 16;
    const std::size_t step = std::clamp(fitting, std::size_t{16}, kChunkRows);
    for (std::size_t begin = 0; begin < outputs; begin += step) add(stage, begin, std::min(begin + step, outputs), expert);
    return (outputs + step - 1) / step;
  }

  std::vector<Task>& tasks_;
  const std::size_t bytes_, task_bytes_;  // of all tasks, of one

 private:
  // Each thread claims one task ahead. No wait is for ever: tasks wait for earlier ones only, and the earliest that is not done is
  // running, since the thread that claimed it could only be held up by one still earlier.
  void work(std::size_t thread) {
    const Task* task = claim();
    while (task != nullptr) {
      const Task* next = claim();
      run(*task, next, thread);
      task = next;
    }
  }

  const Task* claim() {
    const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
    return i < tasks_.size() ? &tasks_[i] : nullptr;
  }

  std::atomic<std::size_t> next_{0};
};

// Where rows of inputs come from.
struct Input {
  const void* rows;
  Dtype dtype;
  std::size_t inputs;
  const std::int32_t* which;  // the row of each packed one; null: its own

  const std::uint8_t* row(std::size_t i) const {
    const std::size_t row = which ? index(which[i]) : i;
    return static_cast<const std::uint8_t*>(rows) + row * inputs * (dtype == kFp32 ? 4 : 2);
  }
};

// The bytes of a call: packed inputs, intermediate results (none for a linear), and what each thread needs.
struct Workspace {
  std::size_t x_bytes, h_bytes, scratch_bytes, most_inputs;  // of a row, a row, a thread

  Workspace(const Kernels& kernels, std::size_t inputs, std::size_t intermediate)
      : x_bytes(stride_of(inputs) * kernels.x_bytes),
        h_bytes(stride_of(intermediate) * kernels.x_bytes),
        most_inputs(std::max(inputs, intermediate)) {
    scratch_bytes = round_up(Scratch::bytes(most_inputs), 4096);
  }
  std::size_t bytes(std::size_t rows, std::size_t threads) const { return rows * (x_bytes + h_bytes) + threads * scratch_bytes; }
};

// A job that packs its inputs first.
class PackedJob : public Job {
 protected:
  PackedJob(State& s, std::size_t bytes, const Kernels& kernels, const Input& input, std::size_t rows, const Workspace& workspace)
      : Job(s, bytes), kernels_(kernels), input_(input), workspace_(workspace) {
    x_ = s.workspace_of(workspace.bytes(rows, s.threads));
    h_ = x_ + rows * workspace.x_bytes;
    scratch_ = h_ + rows * workspace.h_bytes;
    const std::size_t step = std::max<std::size_t>(kPackBytes / workspace.x_bytes, 1);
    for (std::size_t row = 0; row < rows; row += step) add(kPack, row, std::min(row + step, rows));
    packing_left_ = tasks_.size();
  }

  void pack(const Task& task) {
    for (std::size_t i = task.begin; i < task.end; i++) {
      kernels_.pack(input_.row(i), input_.dtype, input_.inputs, x_ + i * workspace_.x_bytes);
    }
    packing_left_.fetch_sub(1, std::memory_order_release);
  }
  void wait_for_inputs() {
    wait_for([this] { return packing_left_.load(std::memory_order_acquire) == 0; });
  }
  Scratch scratch(std::size_t thread) const {
    return Scratch::at(scratch_ + thread * workspace_.scratch_bytes, workspace_.most_inputs);
  }

  const Kernels& kernels_;
  const Input input_;
  const Workspace workspace_;
  std::uint8_t *x_, *h_, *scratch_;

 private:
  std::atomic<std::size_t> packing_left_{0};
};

std::size_t read_bytes(const Matrix& m) { return index(m.row_bytes + 4 * m.groups); }  // of one row
std::size_t all_bytes(const Matrix& m) { return index(m.rows) * read_bytes(m); }

std::size_t used(const std::int32_t* starts, std::size_t experts) {
  std::size_t count = 0;
  for (std::size_t e = 0; e < experts; e++) count += starts[e + 1] > starts[e];
  return count;
}

class ExpertsJob : public PackedJob {
 public:
  ExpertsJob(State& s, const Kernels& kernels, const Expert& expert, std::size_t experts, const std::uint64_t* records,
             const std::int32_t* starts, const Input& input, const std::int32_t* places, const float* factors, float* out,
             bool adding)
      : PackedJob(s, used(starts, experts) * (all_bytes(expert.up) + all_bytes(expert.down)), kernels, input,
                  index(starts[experts]), Workspace(kernels, expert.hidden(), expert.intermediate())),
        expert_(expert),
        experts_(experts),
        records_(records),
        starts_(starts),
        places_(places),
        factors_(factors),
        out_(out),
        adding_(adding),
        up_left_(s.up_left_of(experts)) {
    const std::size_t up_bytes = read_bytes(expert.up) * (expert.gate == kNoGate ? 1 : 2);
    for (std::size_t e = 0; e < experts; e++) {
      up_left_[e] = count(e) ? cut(kUp, expert.intermediate(), up_bytes, e) : 0;
    }
    if (adding) cut(kDown, expert.hidden(), read_bytes(expert.down) * used(starts, experts));
    for (std::size_t e = 0; e < experts && !adding; e++) {
      if (count(e)) cut(kDown, expert.hidden(), read_bytes(expert.down), e);
    }
  }

 private:
  void run(const Task& task, const Task* next, std::size_t thread) override {
    if (task.stage == kPack) return pack(task);
    if (task.stage == kUp) return up(task, place(next), thread);
    if (!adding_) return down(task.expert, task, place(next), thread);
    std::size_t last = 0;
    for (std::size_t e = 0; e < experts_; e++) last = count(e) ? e : last;
    for (std::size_t e = 0, after; e < experts_; e = after) {
      for (after = e + 1; after < experts_ && count(after) == 0;) after++;
      const Place next_rows = e == last ? place(next) : place_of(expert_.down, record(after), task.begin);
      if (count(e)) down(e, task, next_rows, thread);
    }
  }

  Place place(const Task* task) const {
    if (task == nullptr || task->stage == kPack) return {};
    if (task->stage == kDown) return place_of(expert_.down, record(task->expert), task->begin);
    return place_of(expert_.up, record(task->expert), task->begin * (expert_.gate == kInterleaved ? 2 : 1));
  }

  void up(const Task& task, const Place& next, std::size_t thread) {
    wait_for_inputs();
    const std::size_t e = task.expert;
    kernels_.up[expert_.up.encoding](expert_, record(e), task.begin, task.end, tokens(e, x_, workspace_.x_bytes),
                                     h_ + first(e) * workspace_.h_bytes, scratch(thread), next);
    up_left_[e].fetch_sub(1, std::memory_order_release);
  }

  void down(std::size_t e, const Task& task, const Place& next, std::size_t thread) {
    wait_for([this, e] { return up_left_[e].load(std::memory_order_acquire) == 0; });
    kernels_.down[expert_.down.encoding](expert_, record(e), task.begin, task.end, tokens(e, h_, workspace_.h_bytes), out_,
                                         adding_, scratch(thread), next);
  }

  std::size_t first(std::size_t e) const { return index(starts_[e]); }
  std::size_t count(std::size_t e) const { return index(starts_[e + 1]) - first(e); }
  const std::uint8_t* record(std::size_t e) const { return reinterpret_cast<const std::uint8_t*>(records_[e]); }
  Tokens tokens(std::size_t e, const std::uint8_t* rows, std::size_t bytes) const {
    return {rows + first(e) * bytes, count(e), factors_ + first(e), places_ ? places_ + first(e) : nullptr, first(e)};
  }

  const Expert& expert_;
  const std::size_t experts_;
  const std::uint64_t* records_;
  const std::int32_t *starts_, *places_;
  const float* factors_;
  float* out_;
  const bool adding_;
  std::atomic<std::size_t>* up_left_;
};

class LinearJob : public PackedJob {
 public:
  LinearJob(State& s, const Kernels& kernels, const Matrix& matrix, const void* weight, const Input& input, std::size_t rows,
            void* out)
      : PackedJob(s, all_bytes(matrix), kernels, input, rows, Workspace(kernels, input.inputs, 0)),
        matrix_(matrix),
        weight_(static_cast<const std::uint8_t*>(weight)),
        rows_(rows),
        out_(out) {
    cut(kProduct, index(matrix.rows), read_bytes(matrix));
  }

 private:
  void run(const Task& task, const Task* next, std::size_t thread) override {
    if (task.stage == kPack) return pack(task);
    wait_for_inputs();
    const Place next_rows = next ? place_of(matrix_, weight_, next->begin) : Place{};
    kernels_.linear[matrix_.encoding](matrix_, weight_, task.begin, task.end, {x_, rows_, nullptr, nullptr, 0}, out_,
                                      input_.dtype, scratch(thread), next_rows);
  }

  const Matrix& matrix_;
  const std::uint8_t* weight_;
  const std::size_t rows_;
  void* out_;
};

class CombineJob : public Job {
 public:
  CombineJob(State& s, const Kernels& kernels, const float* parts, const std::int32_t* tokens, std::size_t pairs,
             std::size_t columns, void* out, Dtype dtype, std::size_t count)
      : Job(s, pairs * columns * sizeof(float)),
        kernels_(kernels),
        parts_(parts),
        columns_(columns),
        out_(static_cast<std::uint8_t*>(out)),
        dtype_(dtype),
        rows_(s.rows),
        starts_(s.row_starts) {
    starts_.assign(count + 2, 0);  // counted two places on, so that filling moves each start to its place
    for (std::size_t p = 0; p < pairs; p++) starts_[index(tokens[p]) + 2]++;
    for (std::size_t t = 2; t < count + 2; t++) starts_[t] += starts_[t - 1];
    rows_.resize(pairs);
    for (std::size_t p = 0; p < pairs; p++) rows_[index(starts_[index(tokens[p]) + 1]++)] = static_cast<std::int32_t>(p);
    const std::size_t step = std::max<std::size_t>(task_bytes_ / (4 * columns) * count / std::max<std::size_t>(pairs, 1), 1);
    for (std::size_t t = 0; t < count; t += step) add(kCombine, t, std::min(t + step, count));
  }

 private:
  void run(const Task& task, const Task*, std::size_t) override {
    for (std::size_t t = task.begin; t < task.end; t++) {
      kernels_.combine(parts_, rows_.data() + starts_[t], index(starts_[t + 1] - starts_[t]), columns_,
                       out_ + t * columns_ * (dtype_ == kFp32 ? 4 : 2), dtype_);
    }
  }

  const Kernels& kernels_;
  const float* parts_;
  const std::size_t columns_;
  std::uint8_t* out_;
  const Dtype dtype_;
  std::vector<std::int32_t>&rows_, &starts_;
};

}  // namespace
}  // namespace vismoe

using namespace vismoe;

// The instruction sets that this machine and this build have: bit i for Isa i.
VISMOE_API std::uint32_t vismoe_isas() {
  std::uint32_t found = 1u << kPortable;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2) found |= 1u << kAvx2;
  if (avx512) found |= 1u << kAvx512;
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found |= 1u << kAvx512Bf16;
#endif
  return found;
}

// Sets the threads and the instruction set of all later calls, and lets the workspace go. Threads are started by the first call
// that needs them.
VISMOE_API void vismoe_start(std::size_t threads, std::int32_t isa) {
  State& s = the_state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (threads != s.threads) s.pool.reset();
  s.free_workspace();
  s.threads = threads;
  s.isa = static_cast<Isa>(isa);
}

// Bytes of workspace of a call with this many pairs of a token and an expert, inputs of type `dtype`.
VISMOE_API std::size_t vismoe_workspace_bytes(const Expert* expert, std::size_t pairs, std::int32_t dtype, std::size_t threads,
                                              std::int32_t isa) {
  const Kernels& kernels = kernels_for(static_cast<Isa>(isa), static_cast<Dtype>(dtype), expert->up.encoding);
  return Workspace(kernels, expert->hidden(), expert->intermediate()).bytes(pairs, threads);
}

// Bytes of the workspace as it is now.
VISMOE_API std::size_t vismoe_held_bytes() {
  State& s = the_state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.workspace_bytes;
}

// Experts 0 .. n with their records at `records`; pairs starts[i] .. starts[i + 1] belong to expert i. hidden [T, H] contiguous.
// adding == 0: out float32 [P, H] = factor * expert(hidden[token]); otherwise out float32 [T, H] += that, experts in their order.
// Returns 0, or 1 where there is no memory for the workspace or there are no threads to be had.
VISMOE_API std::int32_t vismoe_experts(const Expert* expert, std::size_t n, const std::uint64_t* records,
                                       const std::int32_t* starts, const std::int32_t* tokens, const float* factors,
                                       const void* hidden, std::int32_t dtype, float* out, std::int32_t adding) try {
  State& s = the_state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const Kernels& kernels = kernels_for(s.isa, static_cast<Dtype>(dtype), expert->up.encoding);
  const Input input{hidden, static_cast<Dtype>(dtype), expert->hidden(), tokens};
  ExpertsJob job(s, kernels, *expert, n, records, starts, input, adding ? tokens : nullptr, factors, out, adding != 0);
  job.run_all(s);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// out [n, rows] = x [n, inputs] weight [rows, inputs]^T + bias, in the type of x. Returns as above.
VISMOE_API std::int32_t vismoe_linear(const Matrix* matrix, const void* weight, const void* x, std::int32_t dtype, std::size_t n,
                                      void* out) try {
  State& s = the_state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const Kernels& kernels = kernels_for(s.isa, static_cast<Dtype>(dtype), matrix->encoding);
  const Input input{x, static_cast<Dtype>(dtype), index(matrix->inputs), nullptr};
  LinearJob job(s, kernels, *matrix, weight, input, n, out);
  job.run_all(s);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// out [count, columns] of type `dtype` = the sums of the rows of parts float32 [pairs, columns] of each token, in their order.
VISMOE_API std::int32_t vismoe_combine(const float* parts, const std::int32_t* tokens, std::size_t pairs, std::size_t columns,
                                       void* out, std::int32_t dtype, std::size_t count) try {
  State& s = the_state();
  std::lock_guard<std::mutex> lock(s.mutex);
  CombineJob job(s, kernels_for(s.isa, kFp32, kRawBf16), parts, tokens, pairs, columns, out, static_cast<Dtype>(dtype), count);
  job.run_all(s);
  return 0;
} catch (const std::exception&) {
  return 1;
}
