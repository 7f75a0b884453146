// Encodes rows of weights in the integer formats, as vismoe/formats/half_quadratic.py and affine.py define it.
//
// Sums use the same sixteen lanes whatever the vector width, and no operation is fused, so all instruction sets give the same
// bits. Functions are in an anonymous namespace, so that the linker does not mix the copies of several sets.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace vismoe::affine {

// How scales and offsets are found; the values come from half_quadratic.py.
struct Search {
  const float* kept_ranges;  // [kept_count]
  std::size_t kept_count, steps;
  double shrink_codes, smallest_range;
  std::int64_t nearest;  // 1: by rounding to nearest alone
};

struct Rows {
  const float* weights;  // [rows, inputs]
  std::size_t rows, inputs, group_inputs, row_bytes;
  std::uint8_t* codes;            // [rows, row_bytes]
  std::uint16_t *scale, *offset;  // [rows, groups] bfloat16
};

using EncodeRows = void(int bits, const Rows& rows, const Search& search);
#if defined(__x86_64__)
EncodeRows encode_rows_avx2, encode_rows_avx512;
#endif

namespace {

constexpr std::size_t kSpanInputs = 128;  // the largest group; a multiple of every group's inputs
constexpr double kMostBfloat16 = 0x1.fep127;

// Sixteen floats, in vectors as wide as the instruction set has them.
constexpr std::size_t kLanes = 16;
#if defined(__AVX512F__)
#define VECTOR __attribute__((vector_size(64)))
#elif defined(__AVX2__)
#define VECTOR __attribute__((vector_size(32)))
#else
#define VECTOR __attribute__((vector_size(16)))
#endif
using Vector = float VECTOR;
using Mask = std::int32_t VECTOR;
#undef VECTOR
constexpr std::size_t kVectors = kLanes * sizeof(float) / sizeof(Vector);

struct Floats {
  Vector part[kVectors];
};

template <class Function>
Floats each(const Function& function) {
  Floats result;
  for (std::size_t p = 0; p < kVectors; p++) result.part[p] = function(p);
  return result;
}

inline Floats operator+(const Floats& a, const Floats& b) {
  return each([&](std::size_t p) { return a.part[p] + b.part[p]; });
}

inline Floats operator-(const Floats& a, const Floats& b) {
  return each([&](std::size_t p) { return a.part[p] - b.part[p]; });
}

inline Floats operator*(const Floats& a, const Floats& b) {
  return each([&](std::size_t p) { return a.part[p] * b.part[p]; });
}

inline Floats operator/(const Floats& a, const Floats& b) {
  return each([&](std::size_t p) { return a.part[p] / b.part[p]; });
}

inline Floats least(const Floats& a, const Floats& b) {
  return each([&](std::size_t p) { return a.part[p] < b.part[p] ? a.part[p] : b.part[p]; });
}

inline Floats most(const Floats& a, const Floats& b) {
  return each([&](std::size_t p) { return a.part[p] > b.part[p] ? a.part[p] : b.part[p]; });
}

inline Floats all(double value) {
  return each([&](std::size_t) { return Vector{} + static_cast<float>(value); });
}

inline Floats load(const float* from) {
  return each([&](std::size_t p) {
    Vector part;
    std::memcpy(&part, from + p * kLanes / kVectors, sizeof part);
    return part;
  });
}

inline void store(float* to, const Floats& v) { std::memcpy(to, &v, sizeof v); }

// The first `count` lanes, zeros behind them.
inline Floats first_lanes(const Floats& v, std::size_t count) {
  alignas(64) static constexpr std::int32_t ones_then_zeros[2 * kLanes] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                                           -1, -1, -1, -1, -1, -1, -1, -1};
  const std::int32_t* lanes = ones_then_zeros + (count < kLanes ? kLanes - count : 0);
  return each([&](std::size_t p) {
    Mask mask;
    std::memcpy(&mask, lanes + p * kLanes / kVectors, sizeof mask);
    return reinterpret_cast<Vector>(reinterpret_cast<Mask>(v.part[p]) & mask);
  });
}

// `size` with the sign of `v`.
inline Floats with_sign(const Floats& size, const Floats& v) {
  return each([&](std::size_t p) {
    const Mask sign = reinterpret_cast<Mask>(v.part[p]) & INT32_MIN;
    return reinterpret_cast<Vector>(reinterpret_cast<Mask>(size.part[p]) | sign);
  });
}

inline float total(const Floats& v) {
  using Quarter = float __attribute__((vector_size(16)));
  Quarter quarters[4];
  std::memcpy(quarters, &v, sizeof v);
  const Quarter sum = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

inline Floats square_root(const Floats& v) {
  return each([&](std::size_t p) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(v.part[p]);
#elif defined(__AVX2__)
    return _mm256_sqrt_ps(v.part[p]);
#elif defined(__SSE2__)
    return _mm_sqrt_ps(v.part[p]);
#else
    Vector roots;
    for (std::size_t i = 0; i < kLanes / kVectors; i++) roots[i] = __builtin_sqrtf(v.part[p][i]);
    return roots;
#endif
  });
}

// The nearest finite bfloat16, ties to even.
inline double bfloat16(double value) {
  value = value > kMostBfloat16 ? kMostBfloat16 : value < -kMostBfloat16 ? -kMostBfloat16 : value;
  float rounded = static_cast<float>(value);
  std::uint32_t bits;
  std::memcpy(&bits, &rounded, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  std::memcpy(&rounded, &bits, 4);
  return rounded;
}

// The argument is a bfloat16 value already.
inline std::uint16_t bfloat16_bits(double value) {
  const float exact = static_cast<float>(value);
  std::uint32_t bits;
  std::memcpy(&bits, &exact, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

// weight = scale * code + offset.
struct Line {
  double scale, offset;

  double inverse() const { return scale > 0 ? 1 / scale : 0; }
};

// Sums over a group's codes and weights: all that a fit needs.
struct Moments {
  double mean_code, variance, covariance, explained;

  Moments(std::size_t count, double codes, double squares, double products, double weights) : mean_code(codes / count) {
    const double spread = squares - count * mean_code * mean_code;
    variance = spread > 0.5 / count ? spread : 0;
    covariance = products - mean_code * weights;
    explained = variance > 0 && covariance > 0 ? covariance * covariance / variance : 0;
  }

  Line least_squares(double mean) const {
    const double scale = variance > 0 ? covariance / variance : 0;
    return {scale, mean - scale * mean_code};
  }
};

// One group of one row, and the search for its line. Names and steps are those of half_quadratic.py.
template <int kBits>
class Group {
 public:
  // `weights` [inputs], 1 to kSpanInputs; vectors are filled up with the first one.
  Group(const float* weights, std::size_t inputs) : inputs_(inputs) {
    for (std::size_t i = 0; i < kSpanInputs; i++) weights_[i] = weights[i < inputs ? i : 0];
    Floats low = load(weights_), high = low;
    for (std::size_t i = kLanes; i < inputs; i += kLanes) {
      low = least(low, load(weights_ + i));
      high = most(high, load(weights_ + i));
    }
    float lows[kLanes], highs[kLanes];
    store(lows, low);
    store(highs, high);
    low_ = lows[0], high_ = highs[0];
    for (std::size_t i = 1; i < kLanes; i++) {
      low_ = lows[i] < low_ ? lows[i] : low_;
      high_ = highs[i] > high_ ? highs[i] : high_;
    }
  }

  // Writes centred codes [inputs], zeros up to whole vectors, and returns the line.
  Line encode(const Search& search, std::int8_t* codes) {
    float nearest[kSpanInputs], fitted[kSpanInputs];
    const Line range = round_to_nearest(search, nearest);
    if (search.nearest) {
      write(nearest, codes);
      return range;
    }
    const Line line = fit(search, fitted);
    const bool better = error(line, fitted) < error(range, nearest);
    write(better ? fitted : nearest, codes);
    return better ? line : range;
  }

 private:
  static constexpr double kLowest = -(1 << (kBits - 1)), kMost = (1 << kBits) - 1;

  static Floats whole(const Floats& codes) {
    const Floats least_code = all(kLowest), most_code = all(kLowest + kMost), no_fraction = all(0x1.8p23f);
    return least(most(codes, least_code), most_code) + no_fraction - no_fraction;  // ties to even
  }

  static Floats codes_of(const Floats& weights, const Line& line) {
    const double inverse = line.inverse();
    return whole(weights * all(inverse) - all(line.offset * inverse));
  }

  Line in_units(const Line& line) const { return {line.scale * inverse_, (line.offset - centre_) * inverse_}; }

  Line round_to_nearest(const Search& search, float* codes) const {
    const double offset = bfloat16(low_ - kLowest * (high_ - low_) / kMost);
    const double above = (high_ - offset) / (kLowest + kMost), below = (low_ - offset) / kLowest;
    const double reach = above > below ? above : below;
    const Line line{bfloat16(reach < search.smallest_range ? 0 : reach), offset};
    for (std::size_t i = 0; i < inputs_; i += kLanes) {
      store(codes + i, codes_of(load(weights_ + i) - all(offset), {line.scale, 0}));
    }
    return line;
  }

  Line fit(const Search& search, float* codes) {
    const double span = high_ - low_;
    centre_ = static_cast<float>((low_ + high_) / 2);
    inverse_ = span < search.smallest_range ? 0 : 1 / span;
    Floats sum = all(0), squares = sum;
    for (std::size_t i = 0; i < inputs_; i += kLanes) {
      const Floats units = (load(weights_ + i) - all(centre_)) * all(inverse_), real = first_lanes(units, inputs_ - i);
      store(units_ + i, units);
      sum = sum + real;
      squares = squares + real * real;
    }
    sum_ = total(sum);
    mean_ = sum_ / inputs_;

    const Moments best = refined(search, best_start(search));
    const double slope = best.least_squares(mean_).scale;
    const double length = total(squares) - inputs_ * mean_ * mean_;
    const double longer = best.explained > 0 ? length / best.explained : 1;
    const Line line{bfloat16(span * slope * longer), bfloat16(centre_ + span * (mean_ - slope * longer * best.mean_code))};
    const double shorter = line.scale / longer;
    const Line chosen_by = in_units({shorter, line.offset + (line.scale - shorter) * best.mean_code});
    for (std::size_t i = 0; i < inputs_; i += kLanes) store(codes + i, codes_of(load(units_ + i), chosen_by));
    return line;
  }

  Moments best_start(const Search& search) const {
    Moments best(1, 0, 0, 0, 0);  // explains nothing
    for (std::size_t k = 0; k < search.kept_count; k++) {
      const Floats steps = all(kMost / search.kept_ranges[k]);
      const Moments found = moments([&](const Floats& units) { return whole(units * steps - all(0.5f)); });
      if (k == 0 || found.explained > best.explained) best = found;
    }
    return best;
  }

  Moments refined(const Search& search, Moments best) const {
    Line line = best.least_squares(mean_);
    for (std::size_t step = 0; step < search.steps && line.scale > 0; step++) {
      const Moments found = moments([&](const Floats& units) { return codes_of(units, line); });
      if (found.explained > best.explained) best = found;
      line = shrunk(line, search.shrink_codes);
    }
    return best;
  }

  // The codes of a line, then the line through the weights without the errors that |error|^(1/2) tolerates.
  Line shrunk(const Line& line, double shrink_codes) const {
    const float threshold = static_cast<float>(static_cast<float>(line.scale) * shrink_codes);
    const Floats pull = all(threshold * __builtin_sqrtf(threshold));
    Floats sum = all(0), codes = sum, squares = sum, products = sum;
    for (std::size_t i = 0; i < inputs_; i += kLanes) {
      const Floats units = load(units_ + i), code = first_lanes(codes_of(units, line), inputs_ - i);
      const Floats error = units - (code * all(line.scale) + all(line.offset)), size = most(error, all(0) - error);
      const Floats rest = most(size - pull / square_root(size), all(0));
      const Floats kept = first_lanes(units - with_sign(rest, error), inputs_ - i);
      sum = sum + kept;
      codes = codes + code;
      squares = squares + code * code;
      products = products + code * kept;
    }
    const Moments found(inputs_, total(codes), total(squares), total(products), total(sum));
    return found.least_squares(total(sum) / inputs_);
  }

  template <class Codes>
  Moments moments(const Codes& codes_of_units) const {
    Floats codes = all(0), squares = codes, products = codes;
    for (std::size_t i = 0; i < inputs_; i += kLanes) {
      const Floats units = load(units_ + i), code = first_lanes(codes_of_units(units), inputs_ - i);
      codes = codes + code;
      squares = squares + code * code;
      products = products + code * units;
    }
    return {inputs_, total(codes), total(squares), total(products), sum_};
  }

  // The sum of squared errors, in units.
  float error(const Line& line, const float* codes) const {
    const Line units = in_units(line);
    Floats sum = all(0);
    for (std::size_t i = 0; i < inputs_; i += kLanes) {
      const Floats restored = load(codes + i) * all(units.scale) + all(units.offset);
      const Floats lost = first_lanes(restored - load(units_ + i), inputs_ - i);
      sum = sum + lost * lost;
    }
    return total(sum);
  }

  void write(const float* centred, std::int8_t* codes) const {
    for (std::size_t i = 0; i < inputs_; i++) codes[i] = static_cast<std::int8_t>(centred[i]);
  }

  alignas(64) float weights_[kSpanInputs];
  alignas(64) float units_[kSpanInputs];  // weights from the middle of their range, as shares of it
  std::size_t inputs_;
  double low_, high_, centre_, inverse_, sum_, mean_;
};

// Centred codes [inputs] -> bytes; inputs are a multiple of what 32 bytes hold. As many bit lanes as fit, 32 inputs apart.
template <int kBits>
void pack(const std::int8_t* codes, std::size_t bytes, std::uint8_t* out) {
  if (kBits == 8) {
    std::memcpy(out, codes, bytes);
    return;
  }
  constexpr std::size_t kLoad = 32, kCodes = 8 / kBits;
  for (std::size_t first = 0; first < bytes; first += kLoad) {
    for (std::size_t i = 0; i < kLoad; i++) {
      unsigned byte = 0;
      for (std::size_t lane = 0; lane < kCodes; lane++) {
        byte |= static_cast<unsigned>(codes[kCodes * first + lane * kLoad + i] + (1 << (kBits - 1))) << (lane * kBits);
      }
      out[first + i] = static_cast<std::uint8_t>(byte);
    }
  }
}

template <int kBits>
void encode_rows(const Rows& rows, const Search& search) {
  const std::size_t groups = (rows.inputs + rows.group_inputs - 1) / rows.group_inputs;
  for (std::size_t row = 0; row < rows.rows; row++) {
    for (std::size_t first = 0; first < rows.inputs; first += kSpanInputs) {  // whole groups, and whole 32 bytes of codes
      std::int8_t codes[kSpanInputs] = {};
      for (std::size_t i = first; i < first + kSpanInputs && i < rows.inputs; i += rows.group_inputs) {
        const std::size_t left = rows.inputs - i;
        Group<kBits> group(rows.weights + row * rows.inputs + i, left < rows.group_inputs ? left : rows.group_inputs);
        const Line line = group.encode(search, codes + (i - first));
        rows.scale[row * groups + i / rows.group_inputs] = bfloat16_bits(line.scale);
        rows.offset[row * groups + i / rows.group_inputs] = bfloat16_bits(line.offset);
      }
      const std::size_t at = first * kBits / 8, whole = kSpanInputs * kBits / 8, left = rows.row_bytes - at;
      pack<kBits>(codes, left < whole ? left : whole, rows.codes + row * rows.row_bytes + at);
    }
  }
}

inline void encode_rows(int bits, const Rows& rows, const Search& search) {
  if (bits == 2) return encode_rows<2>(rows, search);
  if (bits == 4) return encode_rows<4>(rows, search);
  encode_rows<8>(rows, search);
}

}  // namespace
}  // namespace vismoe::affine
