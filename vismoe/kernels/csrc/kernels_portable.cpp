// Plain C++: runs on every machine, and is the reference in tests of the other sets.

#include "table.h"

namespace vismoe {
namespace {

struct Portable {
  using X = float;
  static constexpr int kLanes = 8;
  static constexpr std::size_t kTokens = 1, kDecodingTokens = 1, kScaledTokens = 1, kScaledDecodingTokens = 1;
  static constexpr std::size_t kAttended = 2, kAttendedRows = 1;
  struct Operand {
    float lanes[kLanes];
  };
  using Sum = Operand;
  using Part = Operand;

  template <class F>
  static Operand each(F value) {
    Operand all;
    for (int i = 0; i < kLanes; i++) all.lanes[i] = value(i);
    return all;
  }
  static Operand zero() {
    return each([](int) { return 0.0f; });
  }
  static Operand all(const std::uint16_t* p) {
    return each([value = from_bf16(*p)](int) { return value; });
  }
  static Operand load(const X* x) {
    return each([=](int i) { return x[i]; });
  }
  static Operand every(const float* p) { return each([=](int) { return *p; }); }
  static Operand sums(const float* p) { return load(p); }
  static Operand ones() {
    static constexpr float kOne = 1.0f;
    return every(&kOne);
  }
  static Operand scaled_sum(const Operand& sum, const Operand& part, const Operand& scale) { return dot(sum, part, scale); }
  template <int kStep>
  static Operand scale(const float* p) { return every(p); }
  static void store(X* x, const Operand& values) { std::memcpy(x, values.lanes, sizeof values.lanes); }
  static Sum dot(const Sum& sum, const Operand& a, const Operand& b) {
    return each([&](int i) { return sum.lanes[i] + a.lanes[i] * b.lanes[i]; });
  }
  static void sum4(const Sum (&sums)[4], float (&totals)[4]) {
    for (int r = 0; r < 4; r++) {
      const float* s = sums[r].lanes;
      totals[r] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }
  }

  static Operand bf16(const std::uint16_t* p) {
    return each([=](int i) { return from_bf16(p[i]); });
  }
  __attribute__((noinline)) static Operand fp16(const std::uint16_t* p) {  // long, and there are many calls
    return each([=](int i) { return from_fp16(p[i]); });
  }
  static Operand signed_bytes(const std::uint8_t* p) {
    return each([=](int i) { return static_cast<float>(static_cast<std::int8_t>(p[i])); });
  }
  template <int kBits>
  static Operand fields(const std::uint8_t* p, int shift) {
    return each([=](int i) { return static_cast<float>(((p[i] >> shift) & ((1 << kBits) - 1)) - (1 << (kBits - 1))); });
  }
  static Operand scaled(const Operand& values, const Operand& scale, const Operand& offset) {
    return each([&](int i) { return values.lanes[i] * scale.lanes[i] + offset.lanes[i]; });
  }

  template <Encoding E>
  using Decoder = FloatDecoderOf<Portable, E>;
};

}  // namespace

const Kernels& kernels_portable() { return kernels_of<Portable>(); }

}  // namespace vismoe
