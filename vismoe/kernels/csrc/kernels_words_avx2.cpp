// AVX2 for bfloat16 inputs: weights that are integers are multiplied as integers of 16 bits, others in float32. For long prompts
// they lie in the lanes of vectors, as words.

#include "avx2.h"
#include "lanes.h"
#include "words.h"

namespace vismoe {
namespace {

// Twice as many products at a time, and codes need no conversion to float32.
struct Avx2Words : WordSums<Avx2> {
  using Operand = __m256i;
  using Part = __m256i;
  static constexpr int kLanes = 16;
  static constexpr std::size_t kTokens = 3;

  static __m256i ones() { return _mm256_set1_epi16(1); }
  static const __m256i_u& load(const X* x) { return *reinterpret_cast<const __m256i_u*>(x); }
  // At most 128 products of an input, up to 32767, and a code or a code times a scale, up to 4096: 16 in each sum, below 2^31.
  // Assembly, because else compilers copy the inputs to the stack, where all rows share them, and add in a tree that needs more
  // registers than there are.
  static __m256i dot(__m256i part, __m256i weights, const __m256i_u& inputs) {
    __m256i products;
    asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(weights), "m"(inputs));
    part = _mm256_add_epi32(part, products);
    asm("" : "+x"(part));
    return part;
  }
  static __m256 scaled_sum(__m256 sum, __m256i part, __m256 scale) { return Avx2::dot(sum, _mm256_cvtepi32_ps(part), scale); }
  using WordSums::scaled_sum;
  static __m256i add_times(__m256i total, __m256i part, __m256 scale) {
    return _mm256_add_epi32(total, _mm256_mullo_epi32(part, _mm256_castps_si256(scale)));
  }
  static __m256i whole(__m256i words, __m256 scale) {
    const __m256i wide = _mm256_castps_si256(scale);
    return _mm256_mullo_epi16(words, _mm256_packs_epi32(wide, wide));
  }
  static __m256 of_word(const std::uint8_t* half) {  // times kOfWord
    short bits;
    std::memcpy(&bits, half, 2);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_set1_epi16(bits)), every(&kOfWord));
  }
  static void store(X* x, __m256i words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), words); }
  static __m256 times(__m256 sum, __m256 factor) { return _mm256_mul_ps(sum, factor); }
  template <int kStep>
  static __m256 scale(const float* p) {  // each half of a sum of 32 products belongs to 16 neighbouring inputs
    if constexpr (kStep >= static_cast<int>(kWordSpan)) return every(p);
    return _mm256_insertf128_ps(every(p), _mm_broadcast_ss(p + 1), 1);
  }
  template <bool kSigned>
  static __m256i words(Codes codes, bool odd) {
    if constexpr (kSigned) return _mm256_srai_epi16(odd ? codes : _mm256_slli_epi16(codes, 8), 8);
    return odd ? _mm256_srli_epi16(codes, 8) : _mm256_and_si256(codes, _mm256_set1_epi16(0xff));
  }
  // A word of a load has four codes of 4 bits, of which an operand takes those at one place; or two, where the even codes of a row
  // are the low halves of its bytes.
  template <Encoding E>
  static __m256i four_bits(const std::uint8_t* unit, int operand) {
    const __m256i mask = _mm256_set1_epi16(15);
    const int chunk = operand / 2, odd = operand % 2;
    if constexpr (E == kW4) {
      const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + chunk * 16)));
      return odd ? _mm256_srli_epi16(words, 4) : _mm256_and_si256(words, mask);
    } else {
      const std::uint8_t* codes = unit + (E == kQ4K ? 16 : 0) + chunk / 2 * 32;
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
      const int shift = chunk % 2 * 4 + odd * 8;
      const __m256i moved = shift == 0 ? words : _mm256_srli_epi16(words, shift);
      return shift == 12 ? moved : _mm256_and_si256(moved, mask);
    }
  }
  static __m256i less(__m256i part, const std::int32_t* centres) {
    return _mm256_sub_epi32(part, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(centres)));
  }
  static void keep_times(__m256i part, int centre, std::int32_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_mullo_epi32(part, _mm256_set1_epi32(centre)));
  }
  static __m256i signed_bytes(const std::uint8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  template <Encoding E>
  using Decoder = WordDecoder<Avx2Words, E>;
};

// ------------------------------------------------------------------ long prompts and pictures
constexpr std::size_t kRowsBeside = kTile<Avx2>;

// to[pair of codes, row], kRowsBeside rows apart, = the words of the codes of eight rows, [8, kBlockInputs]. They are unpacked as the
// words of inputs lie, the even ones of 32 before the odd ones, so that pairs of both belong together.
void pack_words(const std::uint8_t* codes, std::size_t count, std::int16_t* to) {
  for (std::size_t k = 0; k < count; k += Avx2Words::kLanes, to += Avx2Words::kLanes * kRowsBeside) {
    __m256i v[8];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < 8; r++) v[r] = Avx2Words::signed_bytes(codes + r * kBlockInputs + k);
    transpose(v);
#pragma GCC unroll 8
    for (std::size_t p = 0; p < 8; p++) Avx2Words::store(to + 2 * p * kRowsBeside, v[p]);
  }
}

// to[token, row], `to_stride` apart, = the sums of `inputs` words from `first` on, or += those where they aren't the first. `t`:
// the first token. The products of every kStep are added as integers, which stay below 2^30 (128 words of 15 bits and codes of 7,
// and their signs), and these sums as numbers, times the scale of the token's unit, then those of weights, [step, row]: on the way is
// a sum of inputs times codes, whatever the weights. It fits in float32 for inputs below 2^114.
template <std::size_t kStep, std::size_t N>
void add_words_in_lanes(const std::int16_t* weights, const float* scales, const Inputs<std::int16_t>& in, std::size_t t,
                        std::size_t first, std::size_t inputs, float* to, std::size_t to_stride, Later& later) {
  constexpr std::size_t kPairs = 8;  // of inputs in a round of the inner loop
  for (std::size_t k = first; k < first + inputs; k += kStep, scales += kRowsBeside) {
    __m256i parts[N][2];
#pragma GCC unroll 8
    for (std::size_t n = 0; n < N; n++) parts[n][0] = parts[n][1] = _mm256_setzero_si256();
    for (std::size_t i = k; i < k + kStep; i += 2 * kPairs) {
#pragma GCC unroll 8
      for (std::size_t p = 0; p < kPairs; p++, weights += 2 * kRowsBeside) {
        const __m256i low = Avx2Words::load(weights), high = Avx2Words::load(weights + kRowsBeside);
#pragma GCC unroll 8
        for (std::size_t n = 0; n < N; n++) {
          std::int32_t pair;
          std::memcpy(&pair, in.x + (t + n) * in.stride + i + 2 * p, sizeof pair);
          const __m256i same = _mm256_set1_epi32(pair);
          parts[n][0] = _mm256_add_epi32(parts[n][0], _mm256_madd_epi16(same, low));
          parts[n][1] = _mm256_add_epi32(parts[n][1], _mm256_madd_epi16(same, high));
          asm("" : "+x"(parts[n][0]), "+x"(parts[n][1]));  // in registers, one after the other
        }
      }
    }
#pragma GCC unroll 8
    for (std::size_t n = 0; n < N; n++) {
      const __m256 of_token = _mm256_mul_ps(Avx2::every(in.scales(t + n) + k / kUnit), Avx2::every(&kOfWord));
#pragma GCC unroll 2
      for (std::size_t half = 0; half < 2; half++) {
        float* sums = to + n * to_stride + 8 * half;
        const __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(parts[n][half]), of_token);
        Avx2::store(sums, Avx2::dot(k == 0 ? Avx2::zero() : Avx2::load(sums), part, Avx2::load(scales + 8 * half)));
      }
    }
    later.step();
  }
}

// For one number of inputs that share a scale.
struct StepFunctions {
  decltype(&sum_inputs<Avx2Words, 128>) sum;
  decltype(&add_words_in_lanes<128, 1>) add[Avx2::kTokensBeside];  // by the number of tokens less one
};
template <std::size_t kStep, std::size_t... N>
const StepFunctions& functions_by(std::index_sequence<N...>) {
  static constexpr StepFunctions by = {sum_inputs<Avx2Words, kStep>, {add_words_in_lanes<kStep, N + 1>...}};
  return by;
}
const StepFunctions& functions_of(std::size_t step) {
  const auto tokens = std::make_index_sequence<Avx2::kTokensBeside>();
  return step == 32 ? functions_by<32>(tokens) : step == 64 ? functions_by<64>(tokens) : functions_by<128>(tokens);
}

// Where 16 inputs share a scale, words become numbers too often for lanes to be the quicker ones.
constexpr bool has_words_in_lanes(std::int32_t e) { return has_codes(e) && step_of(static_cast<Encoding>(e)) >= kWordSpan; }

struct LanesOfWords {
  using Set = WithWords<Avx2, Avx2Words>;
  using Floats = LanesOfFloats<Set>;
  Floats floats;  // whose weights have room for as many words
  float* sums;
  float* x_sums;               // [kWideTokens, steps]: the sums of the inputs to which a minimum belongs
  mutable const void* summed;  // the rows of x whose sums these are: a gate and an up, of one matrix, have the same

  static std::size_t bytes(std::size_t inputs) {
    const std::size_t own = Floats::own_bytes(inputs) + kWideTokens * Scratch::steps_of(inputs) * sizeof(float);
    return own > Scratch::bytes(inputs) ? own : Scratch::bytes(inputs);
  }
  static LanesOfWords at(std::uint8_t* memory, std::size_t inputs) {
    const Floats floats = Floats::at(memory, inputs);
    return {floats, floats.sums, reinterpret_cast<float*>(floats.end), nullptr};
  }
  static bool serves(std::int32_t encoding) {
    return encoding == kRawBf16 || encoding == kFp8 || has_words_in_lanes(encoding);
  }

  void operator()(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x, std::size_t n,
                  const Place& next, float* y, std::size_t y_stride) const {
    if (!has_words_in_lanes(m.encoding)) return floats(m, record, begin, end, x, n, next, y, y_stride);
    const Unpacking& of = unpacking<true>(m.encoding, std::make_index_sequence<kEncodings>());
    const StepFunctions& functions = functions_of(of.step);
    const std::size_t inputs = static_cast<std::size_t>(m.inputs), steps = round_up(blocks_of(inputs, of.step), 16);
    std::int16_t* words = reinterpret_cast<std::int16_t*>(floats.weights);
    Scratch scratch{};
    scratch.x_sums = x_sums;
    scratch.steps = steps;
    const Inputs<std::int16_t> in = inputs_of<Avx2Words>(x, row_bytes<Set>(inputs), inputs, scratch);
    const bool affine = has_minima(m);
    if (affine && summed != x) {
      functions.sum(in, inputs, n, x_sums);
      summed = x;
    }
    const auto restore = [&](std::size_t row, std::size_t count, std::size_t first, std::size_t some) {
      floats.unpack_rows(of, m, record, row, count, first, some,
                         [&](std::size_t place) { pack_words(floats.codes, padded(some), words + 2 * place); });
    };
    const auto add = [&](std::size_t tokens, std::size_t t, std::size_t first, std::size_t some, float* to, std::size_t to_stride,
                         Later& later) {
      const float* scales = floats.scales + first / of.step * kRowsBeside;
      functions.add[tokens - 1](words, scales, in, t, first, padded(some), to, to_stride, later);
      Later none{};
      if (!affine || first + some < inputs) return;
      AddTiles<Set>::of[tokens - 1](floats.minima, x_sums + t * steps, steps, steps, false, to, to_stride, none);
    };
    by_tiles<Set>(m, record, begin, end, n, next, of.step, y, y_stride, restore, add);
  }
};

}  // namespace

const Kernels& kernels_avx2words() {
  static const Kernels kernels = with_long_prompts<LanesOfWords>(kernels_of<LanesOfWords::Set>());
  return kernels;
}

}  // namespace vismoe
