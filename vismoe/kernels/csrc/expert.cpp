// The C interface of the expert kernels: one call computes all experts of a layer, one linear, or one sum of expert outputs.
//
// A call is cut into tasks that threads claim in order: first packing inputs, then up and activation of every expert, then down.
// A task waits only for earlier ones, where possible only for those of its own expert, so there is no barrier. Calls from several
// threads run one after another.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "kernels.h"
#include "lossless.h"
#include "pool.h"
#if defined(VISMOE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vismoe {
namespace {

constexpr std::size_t kTaskBytes = 256 * 1024;   // most weights of one task and matrix, unless a set wants more rows: microseconds
constexpr std::size_t kLeastBytes = 32 * 1024;   // least weights of one task and matrix
constexpr std::size_t kTasksOfThread = 32;       // the aim, so that threads finish together
constexpr std::size_t kLongTasksOfThread = 16;   // where a set wants more rows in a task
constexpr std::size_t kAloneBytes = 128 * 1024;  // one thread reads less than this before another has woken up
constexpr std::size_t kPackBytes = 256 * 1024;   // inputs of one packing task
constexpr std::size_t kBlockBytes = 2 * lossless::kBlockWeights;  // decoded before and behind the rows that are wanted, at most
constexpr std::size_t kEnoughThreads = 6;        // of which one can be left to something else
constexpr std::chrono::milliseconds kLongestWait{2};  // for the others to claim all tasks
constexpr std::size_t kGroup = 16;               // rows that kernels for prompts pack together

enum Stage { kPack, kUp, kDown, kProduct, kCombine, kRowwise, kAttend };

struct Task {
  Stage stage;
  std::size_t expert;      // for kUp and kDown; a kDown that adds covers this expert and all after it. For kProduct the matrix
  std::size_t begin, end;  // pairs for kPack, tokens for kCombine, otherwise outputs
};

using Clock = std::chrono::steady_clock;

double steady_s(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }

// ------------------------------------------------------------------ the process's threads and workspace
struct State;

// How a call ended that was begun.
struct Ended {
  const float* out = nullptr;  // whose call it is
  std::int32_t outcome = 0;
  double at_s = 0.0;  // of the steady clock
};

// A call that was begun: the compute threads work on it, unless it is small. `finish` waits for them, or does what they do not.
struct Begun {
  explicit Begun(const float* its_out) : out(its_out) {}
  virtual ~Begun() = default;
  virtual Ended finish(State& s) = 0;

  const float* const out;
};

struct State {
  std::mutex mutex;  // one call at a time
  std::size_t threads = 1;
  Isa isa = kPortable;
  std::unique_ptr<Pool> pool;
  std::uint8_t* workspace = nullptr;  // grows and is kept, like all members below
  std::size_t workspace_bytes = 0;
  std::vector<Task> tasks;
  std::unique_ptr<std::atomic<std::size_t>[]> up_left;
  std::size_t up_left_size = 0;
  std::vector<std::int32_t> rows, row_starts;  // of combine
  std::unique_ptr<Begun> begun;                // uses the members above
  Ended ended;                                 // the latest of those

  void finish_begun() {
    if (begun) ended = begun->finish(*this);
    begun.reset();
  }

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

// One call at a time; what was begun, by a caller that did not come back, ends first.
class Alone {
 public:
  explicit Alone(State& s) : lock_(s.mutex) { s.finish_begun(); }

 private:
  std::lock_guard<std::mutex> lock_;
};

State* state = nullptr;

// A forked child has none of its parent's threads, and a lock that one of them held would never be released: the child starts new
// ones with the same settings.
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

// Inputs are packed once for all matrices of a call: `fp16`, whether one is kRawFp16, `codes`, whether one has codes (`takes_words`).
// `prompt`: the call adds experts up, which functions for prompts do where the set has them.
const Kernels& kernels_for(Isa isa, Dtype x, bool fp16 = false, bool codes = false, bool prompt = false) {
#if defined(VISMOE_AMX)
  if (isa == kAmx && x == kBf16 && !fp16) return codes && !prompt ? kernels_amxwords() : kernels_amx();
#endif
#if defined(__x86_64__)
  if (isa >= kAvx512Bf16 && x == kBf16 && !fp16) return kernels_avx512bf16();
  if (isa == kAvx512 && x == kBf16 && codes && !fp16) return kernels_avx512words();
  if (isa >= kAvx512) return kernels_avx512();
  if (isa == kAvx2) return x == kBf16 && codes && !fp16 ? kernels_avx2words() : kernels_avx2();
#endif
  static_cast<void>(isa), static_cast<void>(x), static_cast<void>(fp16), static_cast<void>(codes);
  return kernels_portable();
}

bool takes_words(Isa isa, const Matrix& m) { return isa == kAmx ? has_codes_for_amx(m.encoding) : has_codes(m.encoding); }

const Kernels& kernels_for(Isa isa, Dtype x, const Matrix& m) {
  return kernels_for(isa, x, m.encoding == kRawFp16, takes_words(isa, m));
}

// ------------------------------------------------------------------ jobs
class Job {
 public:
  Job(State& s, std::size_t bytes)
      : threads_(s.threads),
        tasks_(s.tasks),
        bytes_(bytes),
        share_bytes_(std::max(bytes / (kTasksOfThread * s.threads), kLeastBytes)) {
    tasks_.clear();
  }
  virtual ~Job() = default;

  // Runs all tasks; this thread runs them alone where they read fewer than kAloneBytes.
  void run_all(State& s) {
    if (bytes_ < kAloneBytes) return work(0);
    s.started_pool().run(work_of, this);
  }

  // The same in two steps: between them the other threads work.
  void begin(State& s) {
    if (bytes_ >= kAloneBytes) s.started_pool().begin(work_of, this);
  }
  // Returns when all was done, in seconds of the steady clock.
  double finish(State& s) {
    if (bytes_ < kAloneBytes) {
      work(0);
      return steady_s(Clock::now());
    }
    Pool& pool = s.started_pool();
    const auto claimed = [&] { return next_.load(std::memory_order_relaxed) >= tasks_.size(); };
    if (pool.threads() >= kEnoughThreads) {  // this one is hardly missed, and its caches keep what it does between such calls
      const auto until = Clock::now() + kLongestWait;
      while (pool.working() && !claimed() && Clock::now() < until) pause_core();
    }
    const bool all_claimed = claimed();
    work(0);  // what nobody has claimed
    pool.finish();
    return steady_s(all_claimed && pool.threads() > 1 ? pool.idle_since() : Clock::now());
  }

 protected:
  // `next` is the task that this thread runs afterwards, or null.
  virtual void run(const Task& task, const Task* next, std::size_t thread) = 0;

  void add(Stage stage, std::size_t begin, std::size_t end, std::size_t expert = 0) {
    tasks_.push_back({stage, expert, begin, end});
  }

  // Adds tasks for `outputs` outputs, each task of one matrix or of several; returns the number of tasks.
  std::size_t cut(Stage stage, std::size_t outputs, std::size_t bytes_of_one, std::size_t expert = 0, std::size_t matrices = 1,
                  std::size_t most = kChunkRows) {
    const std::size_t share = std::max(bytes_ / (kLongTasksOfThread * threads_), kLeastBytes);
    const std::size_t bytes = most > kChunkRows ? share : task_bytes(matrices);
    const std::size_t fitting = bytes / std::max<std::size_t>(bytes_of_one, 1) / 16 * 16;
    const std::size_t even = most > kChunkRows ? std::min(outputs / (2 * threads_) / 16 * 16, kChunkRows) : 0;
    const std::size_t step = std::clamp(std::max(fitting, even), least_rows_, most);
    for (std::size_t begin = 0; begin < outputs; begin += step) add(stage, begin, std::min(begin + step, outputs), expert);
    return (outputs + step - 1) / step;
  }

  std::size_t task_bytes(std::size_t matrices = 1) const { return std::min(share_bytes_, matrices * kTaskBytes); }

  const std::size_t threads_;
  std::vector<Task>& tasks_;
  std::size_t least_rows_ = 16;  // of a task

 private:
  static void work_of(void* job, std::size_t thread) { static_cast<Job*>(job)->work(thread); }

  // Each thread claims one task ahead. No wait is endless: a task waits for earlier ones only, and the earliest unfinished task
  // is running, since only a still earlier task could hold up the thread that claimed it.
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

  const std::size_t bytes_, share_bytes_;  // of all tasks; of one task, so that threads finish together
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

// The formats of the records of a call; all have the same hidden and intermediate size.
struct Formats {
  const Expert* experts;
  std::size_t count;

  std::size_t hidden() const { return experts->hidden(); }
  std::size_t intermediate() const { return experts->intermediate(); }
  // Of rows that one task decodes from a lossless record: of a gate, and as far behind it as in the matrix, of up.
  std::size_t unpacked_bytes() const {
    std::size_t most = 0;
    for (std::size_t f = 0; f < count; f++) {
      const Expert& e = experts[f];
      if (e.up_section < 0) continue;
      const std::size_t apart = e.gate == kConcatenated ? e.intermediate() : e.gate == kInterleaved ? kChunkRows : 0;
      const std::size_t up = (apart + kChunkRows) * index(e.up.row_bytes), down = kChunkRows * index(e.down.row_bytes);
      most = std::max({most, up + 2 * kBlockBytes, down + 2 * kBlockBytes});
    }
    return most;
  }
  const Kernels& kernels(Isa isa, Dtype x, bool prompt = false) const {
    bool fp16 = false, codes = false;
    for (std::size_t f = 0; f < count; f++) {
      for (const Matrix* m : {&experts[f].up, &experts[f].down}) {
        fp16 = fp16 || m->encoding == kRawFp16;
        codes = codes || takes_words(isa, *m);
      }
    }
    return kernels_for(isa, x, fp16, codes, prompt);
  }
};

// The workspace bytes of a call: packed inputs, intermediate results (none for a linear), and scratch per thread.
struct Workspace {
  std::size_t x_bytes, h_bytes, scratch_bytes, most_inputs;  // of a row, a row, a thread
  std::size_t unpacked_bytes = 0;                            // of a thread, in its scratch, behind the rest

  Workspace(const Kernels& kernels, const Formats& formats) : Workspace(kernels, formats.hidden(), formats.intermediate()) {
    unpacked_bytes = round_up(formats.unpacked_bytes(), 4096);
    scratch_bytes += unpacked_bytes;
  }
  Workspace(const Kernels& kernels, std::size_t inputs, std::size_t intermediate)
      : x_bytes(kernels.row_bytes(inputs)),
        h_bytes(kernels.row_bytes(intermediate)),
        most_inputs(std::max(inputs, intermediate)) {
    scratch_bytes = Scratch::bytes(most_inputs);
    for (const PromptKernels* prompts : {kernels.prompts, kernels.long_prompts}) {
      if (prompts != nullptr) scratch_bytes = std::max(scratch_bytes, prompts->scratch_bytes(most_inputs));
    }
    scratch_bytes = round_up(scratch_bytes, 4096);
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
  }

  // Adds tasks that pack rows begin .. end; all are added before the others.
  void cut_packing(std::size_t begin, std::size_t end) {
    const std::size_t step = round_up(std::max<std::size_t>(kPackBytes / workspace_.x_bytes, 1), kGroup);
    for (std::size_t row = begin; row < end; row += step) add(kPack, row, std::min(row + step, end));
    packing_left_ = tasks_.size();
  }

  void pack(const Task& task, const PromptKernels* prompts) {
    const bool alone = prompts == nullptr || prompts->pack == nullptr;
    for (std::size_t i = task.begin; alone && i < task.end; i++) {
      kernels_.pack(input_.row(i), input_.dtype, input_.inputs, x_ + i * workspace_.x_bytes);
    }
    for (std::size_t i = task.begin; !alone && i < task.end; i += kGroup) {
      const void* rows[kGroup];
      const std::size_t count = std::min(kGroup, task.end - i);
      for (std::size_t k = 0; k < count; k++) rows[k] = input_.row(i + k);
      prompts->pack(rows, count, input_.inputs, x_ + i * workspace_.x_bytes);
    }
    packing_left_.fetch_sub(1, std::memory_order_release);
  }
  // Outputs of one task, at most, with so many rows and sums each: where sums of all tokens have no room, weights are read again.
  // `section` not negative: a task's rows are decoded first, into room for kChunkRows.
  std::size_t most_outputs(const Matrix& m, std::size_t tokens, std::int32_t section = -1, std::size_t rows = 1,
                           std::size_t sums = 1) const {
    if (kernels_.most_rows == nullptr || section >= 0) return kChunkRows;
    const std::size_t fitting = Scratch::kSums / (sums * std::clamp<std::size_t>(tokens, 1, kPassTokens));
    return std::max(std::min(kernels_.most_rows(m) / rows, fitting) / 16 * 16, kChunkRows);
  }
  void wait_for_inputs() {
    wait_for([this] { return packing_left_.load(std::memory_order_acquire) == 0; });
  }
  std::uint8_t* memory(std::size_t thread) const { return scratch_ + thread * workspace_.scratch_bytes; }
  Scratch scratch(std::size_t thread) const { return Scratch::at(memory(thread), workspace_.most_inputs); }
  std::uint8_t* unpacked(std::size_t thread) const {
    return scratch_ + (thread + 1) * workspace_.scratch_bytes - workspace_.unpacked_bytes + kBlockBytes;
  }

  const Kernels& kernels_;
  const Input input_;
  const Workspace workspace_;
  std::uint8_t *x_, *h_, *scratch_;

 private:
  std::atomic<std::size_t> packing_left_{0};
};

// The experts of a call: the addresses, formats and pairs of each.
struct Records {
  const Formats formats;
  const std::size_t count;
  const std::uint64_t* addresses;
  const std::uint8_t* precisions;  // the format of each; null: the first
  const std::int32_t* starts;      // pairs starts[e] .. starts[e + 1] belong to expert e

  const Expert& expert(std::size_t e) const { return formats.experts[precisions ? precisions[e] : 0]; }
  const std::uint8_t* record(std::size_t e) const { return reinterpret_cast<const std::uint8_t*>(addresses[e]); }
  std::size_t first(std::size_t e) const { return index(starts[e]); }
  std::size_t pairs(std::size_t e) const { return index(starts[e + 1]) - first(e); }
  // The first expert from e on that has pairs; `count` if there is none.
  std::size_t used(std::size_t e) const {
    while (e < count && pairs(e) == 0) e++;
    return e;
  }
  // The sum of bytes(expert) over all experts that have pairs.
  template <class F>
  std::size_t sum(F bytes) const {
    std::size_t total = 0;
    for (std::size_t e = used(0); e < count; e = used(e + 1)) total += bytes(expert(e));
    return total;
  }
};

class ExpertsJob : public PackedJob {
 public:
  ExpertsJob(State& s, const Kernels& kernels, const Records& records, const Input& input, const std::int32_t* places,
             const float* factors, float* out, Outcome outcome)
      : PackedJob(s, records.sum([](const Expert& x) { return x.up.all_bytes() + x.down.all_bytes(); }), kernels, input,
                  index(records.starts[records.count]), Workspace(kernels, records.formats)),
        records_(records),
        places_(places),
        factors_(factors),
        out_(out),
        adding_(outcome != kApart),
        long_(outcome == kAddedOfLong),
        up_left_(s.up_left_of(records.count)) {
    const bool prompt = prompts() != nullptr, together = prompt && prompts()->pack != nullptr;
    if (adding_ && kernels.prompts != nullptr) least_rows_ = kChunkRows;
    for (std::size_t e = records.used(0); e < records.count && together; e = records.used(e + 1)) {
      cut_packing(records.first(e), records.first(e) + records.pairs(e));  // AMX packs rows of one expert together
    }
    if (!together) cut_packing(0, index(records.starts[records.count]));
    for (std::size_t e = records.used(0); e < records.count; e = records.used(e + 1)) {
      const Expert& expert = records.expert(e);
      const std::size_t factor = expert.gate == kNoGate ? 1 : 2;
      const std::size_t rows = expert.gate == kInterleaved ? 2 : 1;
      const std::size_t most = prompt ? kChunkRows : most_outputs(expert.up, records.pairs(e), expert.up_section, rows, factor);
      up_left_[e] = cut(kUp, expert.intermediate(), expert.up.read_bytes() * factor, e, 1, most) + (kernels.settle != nullptr);
    }
    if (adding_) {
      const std::size_t down_bytes = records.sum([](const Expert& x) { return x.down.read_bytes(); });
      cut(kDown, records.formats.hidden(), down_bytes, records.used(0), records.sum([](const Expert&) { return 1; }));
    }
    for (std::size_t e = records.used(0); e < records.count && !adding_; e = records.used(e + 1)) {
      const Expert& expert = records.expert(e);
      const std::size_t most = most_outputs(expert.down, records.pairs(e), expert.down_section);
      cut(kDown, records.formats.hidden(), expert.down.read_bytes(), e, 1, most);
    }
  }

  bool damaged() const { return damaged_.load(std::memory_order_relaxed); }

 private:
  void run(const Task& task, const Task* next, std::size_t thread) override {
    if (task.stage == kPack) return pack(task, prompts());
    if (task.stage == kUp) return up(task, place(next), thread);
    if (!adding_) return down(task.expert, task, place(next), thread);
    for (std::size_t e = task.expert, after; e < records_.count; e = after) {
      after = records_.used(e + 1);
      const bool last = after == records_.count;
      down(e, task, last ? place(next) : place_of_down(after, task), thread);
    }
  }

  Place place_of_down(std::size_t e, const Task& task) const {
    const Expert& expert = records_.expert(e);
    return expert.down_section < 0 ? place_of(expert.down, records_.record(e), task.begin, task.end - task.begin) : Place{};
  }

  Place place(const Task* task) const {
    if (task == nullptr || task->stage == kPack) return {};
    const Expert& expert = records_.expert(task->expert);
    if (task->stage == kDown) return place_of_down(task->expert, *task);
    if (expert.up_section >= 0) return {};
    const std::size_t factor = expert.gate == kInterleaved ? 2 : 1;
    return place_of(expert.up, records_.record(task->expert), factor * task->begin, factor * (task->end - task->begin));
  }

  // The address from which `m` counts the places of its rows, of which begin .. end, and as many `apart` rows later, are there.
  const std::uint8_t* decoded(const Matrix& m, std::int32_t section, const std::uint8_t* record, std::size_t begin, std::size_t end,
                              std::size_t apart, std::size_t thread) {
    if (section < 0) return record;
    const std::size_t inputs = index(m.inputs), weights = index(m.rows) * inputs, row_bytes = index(m.row_bytes);
    std::uint8_t* out = unpacked(thread);
    const std::uint8_t* found = nullptr;
    for (std::size_t part = 0; part < (apart ? 2 : 1); part++) {
      const std::size_t first = (begin + part * apart) * inputs, last = (end + part * apart) * inputs;
      const std::uint8_t* at = lossless::weights_of(record, index(section), weights, first, last, out + part * apart * row_bytes);
      if (at == nullptr) damaged_.store(true, std::memory_order_relaxed);
      if (part == 0) found = at == nullptr ? out : at;
    }
    return found - m.codes - begin * row_bytes;
  }

  void up(const Task& task, const Place& next, std::size_t thread) {
    wait_for_inputs();
    const std::size_t e = task.expert;
    const Expert& expert = records_.expert(e);
    const std::size_t factor = expert.gate == kInterleaved ? 2 : 1, apart = expert.gate == kConcatenated ? expert.intermediate() : 0;
    const std::uint8_t* record = decoded(expert.up, expert.up_section, records_.record(e), factor * task.begin, factor * task.end,
                                         apart, thread);
    const Tokens inputs = tokens(e, x_, workspace_.x_bytes);
    std::uint8_t* h = h_ + records_.first(e) * workspace_.h_bytes;
    if (const PromptKernels* served = prompts()) {
      served->up(expert, record, task.begin, task.end, inputs, h, memory(thread), workspace_.most_inputs, next);
    } else {
      kernels_.up(expert, record, task.begin, task.end, inputs, h, scratch(thread), next);
    }
    if (up_left_[e].fetch_sub(1, std::memory_order_acq_rel) != 2 || kernels_.settle == nullptr) return;
    kernels_.settle(h, expert.intermediate(), records_.pairs(e));
    up_left_[e].fetch_sub(1, std::memory_order_release);
  }

  void down(std::size_t e, const Task& task, const Place& next, std::size_t thread) {
    wait_for([this, e] { return up_left_[e].load(std::memory_order_acquire) == 0; });
    const Expert& expert = records_.expert(e);
    const std::uint8_t* record = decoded(expert.down, expert.down_section, records_.record(e), task.begin, task.end, 0, thread);
    const Tokens inputs = tokens(e, h_, workspace_.h_bytes);
    if (const PromptKernels* served = prompts()) {
      served->down(expert, record, task.begin, task.end, inputs, out_, memory(thread), workspace_.most_inputs, next);
    } else {
      kernels_.down(expert, record, task.begin, task.end, inputs, out_, adding_, scratch(thread), next);
    }
  }

  // The functions for prompts that serve these experts; null: those of decoded tokens do.
  const PromptKernels* prompts() const {
    if (!adding_) return nullptr;
    return long_ && kernels_.long_prompts != nullptr ? kernels_.long_prompts : kernels_.prompts;
  }

  Tokens tokens(std::size_t e, const std::uint8_t* rows, std::size_t bytes) const {
    const std::size_t first = records_.first(e);
    return {rows + first * bytes, records_.pairs(e), factors_ + first, places_ ? places_ + first : nullptr, first};
  }

  const Records& records_;
  const std::int32_t* places_;
  const float* factors_;
  float* out_;
  const bool adding_, long_;
  std::atomic<std::size_t>* up_left_;
  std::atomic<bool> damaged_{false};
};

struct BegunExperts : Begun {
  BegunExperts(State& s, const Kernels& kernels, const Records& its_records, const Input& its_input, const float* factors,
               float* out)
      : Begun(out), records(its_records), input(its_input), job(s, kernels, records, input, nullptr, factors, out, kApart) {}

  Ended finish(State& s) override {
    const double at_s = job.finish(s);
    return {out, job.damaged() ? 2 : 0, at_s};
  }

  const Records records;
  const Input input;
  ExpertsJob job;
};

// Products of the same inputs with several matrices, for all of which these kernels compute.
class LinearsJob : public PackedJob {
 public:
  LinearsJob(State& s, const Kernels& kernels, const Product* products, std::size_t count, const Input& input, std::size_t rows,
             bool of_long)
      : PackedJob(s, all_bytes(products, count), kernels, input, rows, Workspace(kernels, input.inputs, 0)),
        products_(products),
        rows_(rows),
        long_(of_long && kernels.long_linear != nullptr) {
    cut_packing(0, rows);
    for (std::size_t p = 0; p < count; p++) {
      const Matrix& m = *products[p].matrix;
      cut(kProduct, index(m.rows), m.read_bytes(), p, 1, long_ ? kChunkRows : most_outputs(m, rows));
    }
  }

 private:
  static std::size_t all_bytes(const Product* products, std::size_t count) {
    std::size_t bytes = 0;
    for (std::size_t p = 0; p < count; p++) bytes += products[p].matrix->all_bytes();
    return bytes;
  }
  Place place(const Task& task) const {
    const Product& p = products_[task.expert];
    return place_of(*p.matrix, static_cast<const std::uint8_t*>(p.weight), task.begin, task.end - task.begin);
  }

  void run(const Task& task, const Task* next, std::size_t thread) override {
    if (task.stage == kPack) return pack(task, nullptr);
    wait_for_inputs();
    const Product& p = products_[task.expert];
    const std::uint8_t* weight = static_cast<const std::uint8_t*>(p.weight);
    const Tokens tokens{x_, rows_, nullptr, nullptr, 0};
    const Place later = next ? place(*next) : Place{};
    if (long_) {
      kernels_.long_linear(*p.matrix, weight, task.begin, task.end, tokens, p.out, input_.dtype, memory(thread), workspace_.most_inputs, later);
    } else {
      kernels_.linear(*p.matrix, weight, task.begin, task.end, tokens, p.out, input_.dtype, scratch(thread), later);
    }
  }

  const Product* products_;
  const std::size_t rows_;
  const bool long_;
};

class RestoreJob : public Job {
 public:
  RestoreJob(State& s, const Kernels& kernels, const Matrix& matrix, const void* weight, void* out, Dtype via, Dtype dtype)
      : Job(s, matrix.all_bytes()),
        kernels_(kernels),
        matrix_(matrix),
        weight_(static_cast<const std::uint8_t*>(weight)),
        out_(out),
        via_(via),
        dtype_(dtype),
        scratch_bytes_(Workspace(kernels, index(matrix.inputs), 0).scratch_bytes),
        scratch_(s.workspace_of(s.threads * scratch_bytes_)) {
    cut(kProduct, index(matrix.rows), matrix.read_bytes());
  }

 private:
  void run(const Task& task, const Task*, std::size_t thread) override {
    const Scratch scratch = Scratch::at(scratch_ + thread * scratch_bytes_, index(matrix_.inputs));
    kernels_.restore(matrix_, weight_, task.begin, task.end, out_, via_, dtype_, scratch);
  }

  const Kernels& kernels_;
  const Matrix& matrix_;
  const std::uint8_t* weight_;
  void* out_;
  const Dtype via_, dtype_;
  const std::size_t scratch_bytes_;
  std::uint8_t* scratch_;
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
    starts_.assign(count + 2, 0);  // counts are written two places later, so that filling moves each start to its place
    for (std::size_t p = 0; p < pairs; p++) starts_[index(tokens[p]) + 2]++;
    for (std::size_t t = 2; t < count + 2; t++) starts_[t] += starts_[t - 1];
    rows_.resize(pairs);
    for (std::size_t p = 0; p < pairs; p++) rows_[index(starts_[index(tokens[p]) + 1]++)] = static_cast<std::int32_t>(p);
    const std::size_t step = std::max<std::size_t>(task_bytes() / (4 * columns) * count / std::max<std::size_t>(pairs, 1), 1);
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

// Rows that are computed each for itself, each of `bytes` of inputs and outputs.
template <class T>
class RowsJob : public Job {
 public:
  RowsJob(State& s, void (*compute)(const T&, std::size_t, std::size_t), const T& of, std::size_t rows, std::size_t bytes)
      : Job(s, rows * bytes), compute_(compute), of_(of) {
    const std::size_t step = std::max<std::size_t>(task_bytes() / bytes, 1);
    for (std::size_t row = 0; row < rows; row += step) add(kRowwise, row, std::min(row + step, rows));
  }

 private:
  void run(const Task& task, const Task*, std::size_t) override { compute_(of_, task.begin, task.end); }

  void (*compute_)(const T&, std::size_t, std::size_t);
  const T& of_;
};

template <class T>
std::int32_t compute_rows(void (*Kernels::*compute)(const T&, std::size_t, std::size_t), const T& of, std::size_t rows,
                          std::size_t bytes) try {
  State& s = the_state();
  const Alone alone(s);
  RowsJob<T>(s, kernels_for(s.isa, kFp32).*compute, of, rows, bytes).run_all(s);
  return 0;
} catch (const std::exception&) {
  return 1;
}

std::size_t bytes_of(Dtype dtype) { return dtype == kFp32 ? 4 : 2; }

// Attention of one token of each row. A task is a part of the tokens of one key head; the one that ends the last part of a head merges
// them. How tokens are cut into parts depends on their number only.
class AttentionJob : public Job {
 public:
  AttentionJob(State& s, const Kernels& kernels, const Attention& a, const AttentionRow* rows, std::size_t count)
      : Job(s, read_bytes(a, rows, count)), kernels_(kernels), a_(a), rows_(rows), left_(s.up_left_of(count * a.groups)) {
    for (std::size_t row = 0; row < count; row++) {
      const std::size_t tokens = index(rows[row].tokens), step = step_of(tokens);
      for (std::size_t group = 0; group < a.groups; group++) {
        const std::size_t head = row * a.groups + group;
        for (std::size_t begin = 0; begin < tokens; begin += step) add(kAttend, begin, std::min(begin + step, tokens), head);
        left_[head] = (tokens + step - 1) / step;
      }
    }
    const std::size_t parts = tasks_.size();
    parts_ = reinterpret_cast<float*>(s.workspace_of(4 * (parts * a.part_floats() + s.threads * a.scratch_floats())));
    scratch_ = parts_ + parts * a.part_floats();
  }

 private:
  static constexpr std::size_t kMostParts = 64;  // of a head, which bounds the memory for them

  static std::size_t step_of(std::size_t tokens) {
    return std::max(Attention::kBlockKeys, round_up((tokens + kMostParts - 1) / kMostParts, Attention::kBlockKeys));
  }
  static std::size_t read_bytes(const Attention& a, const AttentionRow* rows, std::size_t count) {
    std::size_t tokens = 0;
    for (std::size_t row = 0; row < count; row++) tokens += index(rows[row].tokens);
    return tokens * a.groups * (a.columns + a.value_columns) * bytes_of(a.dtype);
  }

  AttentionTask of(const Task& task) const {
    return {rows_ + task.expert / a_.groups, task.expert % a_.groups, task.begin, task.end};
  }

  void run(const Task& task, const Task* next, std::size_t thread) override {
    const AttentionTask now = of(task);
    float *part = parts_ + static_cast<std::size_t>(&task - tasks_.data()) * a_.part_floats();
    float* scratch = scratch_ + thread * a_.scratch_floats();
    AttentionTask after{};
    if (next) after = of(*next);
    kernels_.attend(a_, now, next ? &after : nullptr, part, scratch);
    if (left_[task.expert].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::size_t tokens = index(now.row->tokens), step = step_of(tokens), count = (tokens + step - 1) / step;
    kernels_.merge(a_, now, part - now.begin / step * a_.part_floats(), count, scratch);
  }

  const Kernels& kernels_;
  const Attention& a_;
  const AttentionRow* rows_;
  std::atomic<std::size_t>* left_;
  float *parts_, *scratch_;
};

// Attention of consecutive tokens of one sequence. A task is some of the rows of a key head; later rows see more keys, and come
// first, so that threads finish together.
class PromptAttentionJob : public Job {
 public:
  PromptAttentionJob(State& s, const Kernels& kernels, const PromptAttention& a)
      : Job(s, a.tokens * a.groups * a.heads * a.all * 2), kernels_(kernels), a_(a), scratch_bytes_(round_up(kernels.attend_rows_bytes(a), 4096)) {
    const std::size_t rows = a.tokens * a.heads, share = rows * a.groups / (8 * s.threads);  // each task packs the keys
    const std::size_t step = std::clamp<std::size_t>(round_up(share, 16), 16, PromptAttention::kMostRows);
    for (std::size_t end = rows; end > 0;) {
      const std::size_t begin = (end - 1) / step * step;
      for (std::size_t group = 0; group < a.groups; group++) add(kAttend, begin, end, group);
      end = begin;
    }
    scratch_ = s.workspace_of(s.threads * scratch_bytes_);
  }

 private:
  void run(const Task& task, const Task*, std::size_t thread) override {
    kernels_.attend_rows(a_, task.expert, task.begin, task.end, scratch_ + thread * scratch_bytes_);
  }

  const Kernels& kernels_;
  const PromptAttention& a_;
  const std::size_t scratch_bytes_;
  std::uint8_t* scratch_;
};

#if defined(VISMOE_AMX)
// Whether the machine has AMX with BF16, and the kernel lets this process use it: tiles are state that a process asks for.
bool may_use_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1u) != 0 && (d >> 24 & 1u) != 0;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return has && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

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
  // Of the processors with BF16 only Cooper Lake lacks the others.
  const bool avx512bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                          __builtin_cpu_supports("gfni");
  if (avx512bf16) found |= 1u << kAvx512Bf16;
#if defined(VISMOE_AMX)
  const bool codes = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi2");
  if (avx512bf16 && codes && may_use_amx()) found |= 1u << kAmx;
#endif
#endif
  return found;
}

// Wakes the compute threads, which then spin for a while: the next call comes soon.
// Returns 0, or 1 where there can be no threads.
VISMOE_API std::int32_t vismoe_rouse() try {
  State& s = the_state();
  const Alone alone(s);
  s.started_pool().rouse();
  return 0;
} catch (const std::exception&) {
  return 1;
}

// Sets the threads and the instruction set of all later calls, and frees the workspace. The first call that needs threads starts
// them.
VISMOE_API void vismoe_start(std::size_t threads, std::int32_t isa) {
  State& s = the_state();
  const Alone alone(s);
  if (threads != s.threads) s.pool.reset();
  s.free_workspace();
  s.threads = threads;
  s.isa = static_cast<Isa>(isa);
}

// Bytes of workspace of a call with this many pairs of a token and an expert, inputs of type `dtype`.
VISMOE_API std::size_t vismoe_workspace_bytes(const Expert* experts, std::size_t formats, std::size_t pairs, std::int32_t dtype,
                                              std::size_t threads, std::int32_t isa) {
  const Formats all{experts, formats};
  const Kernels& kernels = all.kernels(static_cast<Isa>(isa), static_cast<Dtype>(dtype));
  return Workspace(kernels, all).bytes(pairs, threads);
}

// Bytes of the workspace now.
VISMOE_API std::size_t vismoe_held_bytes() {
  State& s = the_state();
  const Alone alone(s);
  return s.workspace_bytes;
}

// Experts 0 .. n with their records at `addresses`; record i has the layout experts[precisions[i]], or experts[0] if that is
// null.
// Pairs starts[i] .. starts[i + 1] belong to expert i. hidden [T, H] contiguous.
// kApart: out float32 [P, H] = factor * expert(hidden[token]); otherwise this is added to out float32 [T, H], experts in
// order.
// Returns 0, 1 if memory for the workspace or threads could not be had, or 2 for a damaged lossless record.
VISMOE_API std::int32_t vismoe_experts(const Expert* experts, std::size_t formats, std::size_t n, const std::uint64_t* addresses,
                                       const std::uint8_t* precisions, const std::int32_t* starts, const std::int32_t* tokens,
                                       const float* factors, const void* hidden, std::int32_t dtype, float* out,
                                       std::int32_t outcome) try {
  State& s = the_state();
  const Alone alone(s);
  const Records records{{experts, formats}, n, addresses, precisions, starts};
  const Kernels& kernels = records.formats.kernels(s.isa, static_cast<Dtype>(dtype), outcome != kApart);
  const Input input{hidden, static_cast<Dtype>(dtype), experts->hidden(), tokens};
  ExpertsJob job(s, kernels, records, input, outcome == kApart ? nullptr : tokens, factors, out, static_cast<Outcome>(outcome));
  job.run_all(s);
  return job.damaged() ? 2 : 0;
} catch (const std::exception&) {
  return 1;
}

// Begins what vismoe_experts does for one token, with kApart: the other compute threads work until vismoe_experts_end, which waits
// for them and has the outcome, or any other call. All that is named here stays as it is until then. Returns 0, or 1 as above.
VISMOE_API std::int32_t vismoe_experts_begin(const Expert* experts, std::size_t n, const std::uint64_t* addresses,
                                             const std::int32_t* starts, const std::int32_t* tokens, const float* factors,
                                             const void* hidden, std::int32_t dtype, float* out) try {
  State& s = the_state();
  const Alone alone(s);
  const Formats formats{experts, 1};
  const Kernels& kernels = formats.kernels(s.isa, static_cast<Dtype>(dtype));
  auto begun = std::make_unique<BegunExperts>(s, kernels, Records{formats, n, addresses, nullptr, starts},
                                              Input{hidden, static_cast<Dtype>(dtype), experts->hidden(), tokens}, factors, out);
  begun->job.begin(s);
  s.begun = std::move(begun);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// Ends the call into `out` that was begun, if it has not been ended, and returns its outcome, as vismoe_experts does; 0 where there
// is none. ended_s, or null: when it had ended, in seconds of the steady clock.
VISMOE_API std::int32_t vismoe_experts_end(const float* out, double* ended_s) {
  State& s = the_state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.begun && s.begun->out == out) s.finish_begun();
  const Ended ended = s.ended.out == out ? std::exchange(s.ended, {}) : Ended{};
  if (ended_s != nullptr) *ended_s = ended.at_s;
  return ended.outcome;
}

// The out [n, rows] of each product = x [n, inputs] weight [rows, inputs]^T + bias, in the type of x. `of_long`: the
// rows are those of a long prompt or of a picture. Returns 0 or 1, as above.
VISMOE_API std::int32_t vismoe_linears(const Product* products, std::size_t count, const void* x, std::int32_t dtype,
                                       std::size_t n, std::int32_t of_long) try {
  State& s = the_state();
  const Alone alone(s);
  const auto kernels_of = [&](std::size_t p) -> const Kernels& {
    return kernels_for(s.isa, static_cast<Dtype>(dtype), *products[p].matrix);
  };
  for (std::size_t begin = 0, end = 0; begin < count; begin = end) {
    const Kernels& kernels = kernels_of(begin);
    while (end < count && &kernels_of(end) == &kernels) end++;
    const Input input{x, static_cast<Dtype>(dtype), index(products[begin].matrix->inputs), nullptr};
    LinearsJob(s, kernels, products + begin, end - begin, input, n, of_long != 0).run_all(s);
  }
  return 0;
} catch (const std::exception&) {
  return 1;
}

VISMOE_API std::int32_t vismoe_linear(const Matrix* matrix, const void* weight, const void* x, std::int32_t dtype, std::size_t n,
                                      void* out, std::int32_t of_long) {
  const Product product{matrix, weight, out};
  return vismoe_linears(&product, 1, x, dtype, n, of_long);
}

// out [rows, inputs] of type `dtype` = the weights of a matrix, rounded to type `via` first. Returns 0 or 1, as above.
VISMOE_API std::int32_t vismoe_restore(const Matrix* matrix, const void* weight, std::int32_t via, std::int32_t dtype,
                                       void* out) try {
  State& s = the_state();
  const Alone alone(s);
  const Kernels& kernels = kernels_for(s.isa, kFp32, *matrix);
  RestoreJob job(s, kernels, *matrix, weight, out, static_cast<Dtype>(via), static_cast<Dtype>(dtype));
  job.run_all(s);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// out [count, columns] of type `dtype` = the sums of the rows of parts float32 [pairs, columns] of each token, in their order.
VISMOE_API std::int32_t vismoe_combine(const float* parts, const std::int32_t* tokens, std::size_t pairs, std::size_t columns,
                                       void* out, std::int32_t dtype, std::size_t count) try {
  State& s = the_state();
  const Alone alone(s);
  CombineJob job(s, kernels_for(s.isa, kFp32), parts, tokens, pairs, columns, out, static_cast<Dtype>(dtype), count);
  job.run_all(s);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// Rows of a root-mean-square norm, of x or of x + other (kernels.h: Norm). Returns 0 or 1, as above.
VISMOE_API std::int32_t vismoe_norm(const void* x, const void* weight, void* out, std::size_t rows, std::size_t columns, float eps,
                                    float unit, std::int32_t dtype, const void* other, void* sum) {
  const Norm norm{x, weight, out, columns, eps, unit, static_cast<Dtype>(dtype), other, sum};
  return compute_rows(&Kernels::norm, norm, rows, 2 * columns * bytes_of(norm.dtype));
}

// The rotary embedding of queries and keys of `rows` tokens (kernels.h: Rotation). Returns 0 or 1, as above.
VISMOE_API std::int32_t vismoe_rotate(const void* queries, std::size_t query_heads, void* turned_queries, const void* keys,
                                      std::size_t key_heads, void* turned_keys, const void* cos, const void* sin, std::size_t rows,
                                      std::size_t columns, std::size_t turned, std::int32_t dtype) {
  const Rotation rotation{{queries, keys}, {turned_queries, turned_keys}, {query_heads, key_heads}, columns, turned, cos, sin,
                          static_cast<Dtype>(dtype)};
  return compute_rows(&Kernels::rotate, rotation, rows, 2 * (query_heads + key_heads) * columns * bytes_of(rotation.dtype));
}

// The experts of `rows` tokens and their weights (kernels.h: Choice). Returns 0 or 1, as above.
VISMOE_API std::int32_t vismoe_choose(const void* logits, std::int32_t dtype, std::size_t rows, std::size_t count,
                                      std::size_t chosen, std::int32_t normalised, void* weights, std::int32_t weights_dtype,
                                      std::int64_t* ids) {
  const Choice choice{logits, weights, ids, count, chosen, static_cast<Dtype>(dtype), static_cast<Dtype>(weights_dtype),
                      normalised != 0};
  return compute_rows(&Kernels::choose, choice, rows, count * bytes_of(choice.dtype));
}

// Attention of the latest token of each of `count` sequences (kernels.h: Attention); every one has tokens, and columns are
// multiples of 16. Returns 0 or 1, as above.
VISMOE_API std::int32_t vismoe_attend(const AttentionRow* rows, std::size_t count, std::size_t groups, std::size_t heads,
                                      std::size_t columns, std::size_t value_columns, float scale, std::int32_t dtype,
                                      std::int32_t mask_dtype) try {
  State& s = the_state();
  const Alone alone(s);
  const Attention a{groups, heads, columns, value_columns, scale, static_cast<Dtype>(dtype), static_cast<Dtype>(mask_dtype)};
  AttentionJob(s, kernels_for(s.isa, kFp32), a, rows, count).run_all(s);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// Attention of consecutive tokens of a sequence (kernels.h: PromptAttention); there are tokens and keys, and every token sees one
// or more. Returns 0 or 1, as above.
VISMOE_API std::int32_t vismoe_attend_prompt(const PromptAttention* attention) try {
  State& s = the_state();
  const Alone alone(s);
  PromptAttentionJob(s, kernels_for(s.isa, attention->dtype), *attention).run_all(s);
  return 0;
} catch (const std::exception&) {
  return 1;
}
