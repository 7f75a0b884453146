// Products of decoded tokens by AMX's products of bytes: sixteen rows of codes meet the digits of one token.
//
// A row of x becomes integers of 16 bits, words, with a scale for each 128 inputs (a power of two), and a word becomes two digits: it
// is 256 high + low, each a signed byte. A tile holds 64 codes of sixteen rows. The tile that it meets has a column for each digit
// of each block of inputs with one scale, and zeros where a column's block is not: so one product sums all blocks apart. These sums
// are exact integers; scaled, they are added in float32. Their order depends on the row and its token alone. As kernel.h, in an
// anonymous namespace; for inputs in bfloat16, whose number is a multiple of 256.

#pragma once

#include "amx.h"
#include "avx512bf16.h"

namespace vismoe {
namespace {

constexpr std::size_t kSpanInputs = 256;       // that are computed at a time, of sixteen rows
constexpr std::size_t kSpanUnits = kSpanInputs / kUnit;
constexpr std::size_t kTileRows = 16, kTileBytes = 64;
constexpr std::size_t kColumns = 8;            // of a tile of digits, 4 bytes each: two digits of four blocks
constexpr std::size_t kDigitTileBytes = kTileRows * kColumns * 4, kUnitTiles = 2;
constexpr std::size_t kDigitTokens = 16;       // whose digits are kept
constexpr std::size_t kAheadInStream = 288;    // so many bytes ahead of a row are prefetched
constexpr std::size_t kStreamTarget = 18 * 1024, kStreamRows = 32;  // bytes of a stream, which is no longer than so many rows
constexpr float kMostWord = 32639.0f;          // 127 * 256 + 127: of bfloat16 numbers only 32640 is rounded to it

// How digits lie in tiles. A unit's codes fill two tiles. Where two codes share a byte, the second tile holds the lower halves, and
// the first the bytes as they are: digits of the opposite of a word, high and low together, take the lower halves off again.
enum Digits : std::int32_t {
  kBlocksOf32,  // tile t: blocks 2 t and 2 t + 1 of 32 inputs
  kHalvesOf64,  // lower and upper halves of 32 bytes are the inputs of a block of 32 and of the next
  kHalvesOf2,   // lower and upper halves of a byte are an input and the next
};

// The encodings for which this is faster than AVX-512 with BF16.
constexpr bool in_bytes(Encoding e) { return e == kQ4K || e == kQ5K || e == kW4 || e == kMxFp4 || e == kIq4Xs; }
constexpr Digits digits_of(Encoding e) { return e == kQ4K ? kHalvesOf64 : e == kW4 ? kHalvesOf2 : kBlocksOf32; }
constexpr bool in_halves(Encoding e) { return digits_of(e) >= kHalvesOf64; }
// Those of kW4 are not negative here: its minima take off what that adds.
constexpr bool takes_minima_off(Encoding e) { return e == kQ4K || e == kQ5K || e == kW4; }
// Whether a block has a factor, and scales that are bytes times it.
constexpr bool has_byte_scales(Encoding e) { return e == kQ4K || e == kQ5K; }
constexpr std::size_t sums_of(std::size_t inputs, std::size_t step) { return round_up(inputs / step, 16); }

// What a thread keeps of the tokens that it has multiplied last. Tasks of one matrix follow each other.
struct KeptDigits {
  std::uint64_t call;  // none has the number 0
  const void* x;
  std::size_t tokens;
  std::int32_t digits, step_of_sums;  // 0: none
};

struct alignas(kAlignment) ByteScratch {
  std::uint8_t codes[2][4][kTileRows][kTileBytes];  // of a span and the next
  std::uint8_t copies[2][kSpanUnits][kTileRows][kTileBytes];  // of bytes with two codes, where there are fewer rows
  std::int32_t parts[2][kTileRows][16];             // sums of a span and a token, and of those before; the columns of two tiles
  float sums[kDigitTokens][kTileRows][16];
  std::uint8_t scales[2][kTileRows][16];            // of a span and the next, repeated for the digits
  float factors[2][kTileRows];
  float scaling[kTileRows][16];                     // of the columns, for the tokens behind the first
  KeptDigits kept;

  // Behind it, for matrices of so many inputs: [kDigitTokens, units, kUnitTiles, 16, kColumns, 4].
  std::uint8_t* digits() { return reinterpret_cast<std::uint8_t*>(this + 1); }
  float* units(std::size_t inputs) {  // [kDigitTokens, units, kColumns]: what a sum of digits is times
    return reinterpret_cast<float*>(digits() + kDigitTokens * inputs / kUnit * kUnitTiles * kDigitTileBytes);
  }
  float* inputs(std::size_t most) { return units(most) + kDigitTokens * most / kUnit * kColumns; }  // sums of steps
  std::uint8_t* minima(std::size_t most) {  // [2, 16, sums_of(most, 32)]: of a group of rows and the next, with byte scales
    return reinterpret_cast<std::uint8_t*>(inputs(most) + kDigitTokens * sums_of(most, 32));
  }
  float* minimum_factors(std::size_t most) {  // [2, spans, and one, 16]
    return reinterpret_cast<float*>(minima(most) + 2 * kTileRows * sums_of(most, 32));
  }
  static std::size_t bytes(std::size_t inputs) {
    const std::size_t padded_to = round_up(inputs, kSpanInputs), units = padded_to / kUnit;
    const std::size_t of_token = units * (kUnitTiles * kDigitTileBytes + kColumns * 4) + sums_of(padded_to, 32) * 4;
    const std::size_t of_minima = 2 * kTileRows * (sums_of(padded_to, 32) + (padded_to / kSpanInputs + 1) * 4);
    return sizeof(ByteScratch) + kDigitTokens * of_token + of_minima;
  }
};

// ------------------------------------------------------------------ digits
// The high and low digits of 4 inputs in 8 bytes each, as columns have them.
inline void pair_digits(const std::uint8_t (&high)[kUnit], const std::uint8_t (&low)[kUnit], std::uint64_t (&pairs)[kUnit / 4]) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (std::size_t i = 0; i < 2; i++) {
    const __m512i h = _mm512_load_si512(high + 64 * i), l = _mm512_load_si512(low + 64 * i);
    _mm512_store_si512(pairs + 16 * i, _mm512_permutex2var_epi32(h, first, l));
    _mm512_store_si512(pairs + 16 * i + 8, _mm512_permutex2var_epi32(h, second, l));
  }
}

// Bytes with even numbers first.
inline void even_first(std::uint8_t (&bytes)[kUnit]) {
  const __m512i a = _mm512_load_si512(bytes), b = _mm512_load_si512(bytes + 64);
  const auto both = [](__m256i x, __m256i y) { return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1); };
  _mm512_store_si512(bytes, both(_mm512_cvtepi16_epi8(a), _mm512_cvtepi16_epi8(b)));
  const __m512i odd_a = _mm512_srli_epi16(a, 8), odd_b = _mm512_srli_epi16(b, 8);
  _mm512_store_si512(bytes + 64, both(_mm512_cvtepi16_epi8(odd_a), _mm512_cvtepi16_epi8(odd_b)));
}

// Digits of words or of their opposites.
struct UnitDigits {
  alignas(kAlignment) std::uint8_t high[kUnit], low[kUnit];
  alignas(kAlignment) std::uint64_t pairs[kUnit / 4];

  void set(std::size_t i, __m512i words) {
    const __m512i signed_low = _mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24);
    const __m512i rest = _mm512_srai_epi32(_mm512_sub_epi32(words, signed_low), 8);
    _mm_store_si128(reinterpret_cast<__m128i*>(low + 16 * i), _mm512_cvtepi32_epi8(signed_low));
    _mm_store_si128(reinterpret_cast<__m128i*>(high + 16 * i), _mm512_cvtepi32_epi8(rest));
  }
  void pair(bool in_two) {
    if (in_two) even_first(high), even_first(low);
    pair_digits(high, low, pairs);
  }
};

// The digits of 128 inputs, in two tiles; what their sums are times, and the sums of the inputs of each step.
template <Digits kDigits, std::size_t kStep, bool kSums>
inline void digits_of_unit(const Avx512Bf16::X* x, std::uint8_t* tiles, float* times, float* sums) {
  __m512 values[8];
  __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(reinterpret_cast<const std::uint8_t*>(x + 16 * i))), 16);
    values[i] = _mm512_castsi512_ps(bits);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  const std::uint32_t exponent = [&] {
    const std::uint32_t found = _mm512_reduce_max_epu32(largest) >> 23;
    return found > kLeastOfWords ? found : kLeastOfWords;
  }();
  const float scale = scale_of_words(exponent) * kOfWord;
  const __m512 to_words = _mm512_set1_ps(words_in_one(exponent)), most = _mm512_set1_ps(kMostWord);
  constexpr bool kHalves = kDigits >= kHalvesOf64;
  UnitDigits of, opposite;
  __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m512 word = _mm512_max_ps(_mm512_min_ps(_mm512_mul_ps(values[i], to_words), most), _mm512_set1_ps(-kMostWord));
    const __m512i words = _mm512_cvtps_epi32(word);
    of.set(static_cast<std::size_t>(i), words);
    if (kHalves) opposite.set(static_cast<std::size_t>(i), _mm512_sub_epi32(_mm512_setzero_si512(), words));
    if (!kSums) continue;
    sum = _mm512_add_epi32(sum, words);
    if ((i + 1) * 16 % static_cast<int>(kStep) == 0) {
      sums[(i + 1) * 16 / static_cast<int>(kStep) - 1] = static_cast<float>(_mm512_reduce_add_epi32(sum)) * scale;
      sum = _mm512_setzero_si512();
    }
  }
  of.pair(kDigits == kHalvesOf2);
  if (kHalves) opposite.pair(kDigits == kHalvesOf2);
  std::memset(tiles, 0, kUnitTiles * kDigitTileBytes);
  std::uint64_t* to = reinterpret_cast<std::uint64_t*>(tiles);
  constexpr std::size_t kRow = kColumns / 2, kTile = kTileRows * kRow;
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kTileRows; r++, to += kRow) {
    const std::size_t half = r / 8;
    if (kDigits == kBlocksOf32) {
      to[half] = of.pairs[r];
      to[kTile + 2 + half] = of.pairs[kTileRows + r];
    } else {
      const std::size_t low = kDigits == kHalvesOf2 ? r : 16 * half + r % 8, high = low + (kDigits == kHalvesOf2 ? 16 : 8);
      to[2 + half] = of.pairs[high];
      to[kTile + half] = of.pairs[low];
      to[kTile + 2 + half] = opposite.pairs[high];
    }
  }
  for (std::size_t c = 0; c < kColumns; c++) {
    times[c] = scale * (c % 2 == 0 ? 256.0f : 1.0f) * (kHalves && c >= kColumns / 2 ? 0x1p-4f : 1.0f);
  }
}

// ------------------------------------------------------------------ sixteen rows
// Codes and digits go into tiles 4 and 6, or 5 and 7. Compilers take only literals as the numbers of tiles.
template <bool kOdd>
inline void load_tiles(const std::uint8_t* codes, std::size_t codes_apart, const std::uint8_t* digits, std::size_t digits_apart) {
  if constexpr (kOdd) {
    _tile_loadd(7, digits, digits_apart);
    _tile_loadd(5, codes, codes_apart);
  } else {
    _tile_loadd(6, digits, digits_apart);
    _tile_loadd(4, codes, codes_apart);
  }
}
template <int kInto, bool kOdd, bool kSigned>
inline void add_products() {
  if constexpr (kInto == 0 && !kOdd && !kSigned) _tile_dpbusd(0, 4, 6);
  if constexpr (kInto == 0 && !kOdd && kSigned) _tile_dpbssd(0, 4, 6);
  if constexpr (kInto == 0 && kOdd && !kSigned) _tile_dpbusd(0, 5, 7);
  if constexpr (kInto == 0 && kOdd && kSigned) _tile_dpbssd(0, 5, 7);
  if constexpr (kInto == 1 && !kOdd && !kSigned) _tile_dpbusd(1, 4, 6);
  if constexpr (kInto == 1 && !kOdd && kSigned) _tile_dpbssd(1, 4, 6);
  if constexpr (kInto == 1 && kOdd && !kSigned) _tile_dpbusd(1, 5, 7);
  if constexpr (kInto == 1 && kOdd && kSigned) _tile_dpbssd(1, 5, 7);
}

// Rows that are multiplied together.
struct RowGroup {
  const std::uint8_t* rows[kTileRows];   // the last one again where there are fewer
  std::size_t apart;                     // bytes from each row to the next, 0 where there are fewer
  std::size_t first, count, row_apart;   // outputs
};

// One of the spans of all groups in turn.
struct Span {
  std::size_t number = 0, of_row = 0, group = 0;  // over all groups, in its row

  std::size_t parity() const { return number % 2; }
  void step(std::size_t spans) {
    number++;
    if (++of_row == spans) of_row = 0, group++;
  }
};

// Rows of each of the sixteen streams of a task with `rows` rows. Streams whole pages apart would share sets of the L1 cache.
inline std::size_t rows_of_stream(std::size_t rows, std::size_t row_bytes) {
  const std::size_t most = rows / kTileRows;
  return most - (most > 1 && most * row_bytes % 4096 == 0);
}

template <Encoding E>
struct SixteenRows {
  static constexpr std::size_t kStep = step_of(E), kSpanBytes = unit_bytes(E) * kSpanInputs / unit_inputs(E);
  static constexpr Digits kDigits = digits_of(E);
  static constexpr bool kHalves = in_halves(E), kBytes = has_byte_scales(E);

  const Matrix& m;
  const std::uint8_t* record;
  std::size_t begin, end;  // outputs
  const Place& next;
  ByteScratch& scratch;
  std::size_t inputs, tokens, room;
  float *scales, *minima;  // [16, room] unless they are bytes
  RowGroup group[2];       // by the number of a group modulo 2; spans are counted over all groups
  // The rows of all groups lie in sixteen streams, one behind the other; then those of `next` are read.
  std::size_t stream_rows;
  const std::uint8_t *stream, *next_stream;
  std::size_t stream_bytes, next_stream_bytes;

  std::size_t spans() const { return inputs / kSpanInputs; }
  std::size_t groups() const { return (end - begin + kTileRows - 1) / kTileRows; }
  static const std::uint8_t* pairs_of_codes(const std::uint8_t* span, std::size_t u) {
    return E == kQ4K ? span + 16 + u * 64 : span + u * 64;
  }

  // Rows that are read together are far apart, as those of the other kernels, but for the last ones. Some may be computed twice.
  void place(std::size_t g) {
    const std::size_t row_bytes = static_cast<std::size_t>(m.row_bytes), count = end - begin;
    RowGroup& made = group[g % 2];
    made.count = least(kTileRows, count);
    made.first = g < stream_rows ? g : least(g * kTileRows, count - made.count);
    made.row_apart = g < stream_rows ? stream_rows : 1;
    made.apart = count < kTileRows ? 0 : made.row_apart * row_bytes;
    const std::uint8_t* codes = record + m.codes + (begin + made.first) * row_bytes;
    for (std::size_t r = 0; r < kTileRows; r++) {
      made.rows[r] = codes + least(r, made.count - 1) * made.row_apart * row_bytes;
    }
  }

  // The scales and minima of a group's rows; those of the next are fetched.
  void read_rows(std::size_t g) {
    if constexpr (!kBytes) {
      for (std::size_t r = 0; r < kTileRows; r++) {
        const RowGroup& of = group[g % 2];
        read_row(begin + of.first + least(r, of.count - 1) * of.row_apart, scales + r * room, minima + r * room);
      }
      fetch_rows(g);
    }
    std::memset(scratch.sums, 0, tokens * sizeof scratch.sums[0]);
  }
  void read_row(std::size_t row, float* scale, float* minimum) const {
    const std::size_t steps = sums_of(inputs, kStep);
    if (E != kW4 || m.offset >= 0 || m.scale_dtype != kBf16 || m.group_inputs != static_cast<std::int32_t>(kStep)) {
      read_scales<E>(m, record, row, scale, minimum);
      for (std::size_t s = 0; E == kW4 && s < steps; s++) minimum[s] = (m.offset >= 0 ? minimum[s] : 0.0f) - 8.0f * scale[s];
      return;
    }
    const std::uint8_t* from = record + m.scale + row * m.scale_bytes();
    for (std::size_t s = 0; s < steps; s += 16) {
      const __mmask16 there = static_cast<__mmask16>((1u << least(inputs / kStep - s, 16)) - 1);
      const __m512 sixteen = wide(_mm256_maskz_loadu_epi16(there, from + 2 * s));
      _mm512_storeu_ps(scale + s, sixteen);
      _mm512_storeu_ps(minimum + s, _mm512_mul_ps(_mm512_set1_ps(-8.0f), sixteen));
    }
  }
  void fetch_rows(std::size_t g) const {
    const bool more = g + 1 < groups();
    if (!more && next.codes == nullptr) return;
    const std::size_t apart = more ? stream_rows : next.apart * kRows / kTileRows, first = begin + g + 1;
    const std::size_t scale_bytes = more ? m.scale_bytes() : next.scale_bytes;
    const std::size_t offset_bytes = more ? m.offset_bytes() : next.offset_bytes;
    const std::uint8_t* scale = more ? record + m.scale + first * scale_bytes : next.scale;
    const std::uint8_t* offset = more ? record + m.offset + first * offset_bytes : next.offset;
    for (std::size_t r = 0; r < kTileRows; r++) {
      for (std::size_t b = 0; b < scale_bytes; b += 64) __builtin_prefetch(scale + r * apart * scale_bytes + b);
      for (std::size_t b = 0; b < offset_bytes; b += 64) __builtin_prefetch(offset + r * apart * offset_bytes + b);
    }
  }

  // Codes of four rows of a span become bytes in tiles, and what comes later is fetched.
  void decode(const Span& span_of, std::size_t q) {
    const std::size_t k = span_of.parity(), s = span_of.of_row, ahead = span_of.number * kSpanBytes + kAheadInStream;
    const RowGroup& of = group[span_of.group % 2];
    const bool here = ahead < stream_bytes;
    const std::size_t apart = here ? stream_bytes : next_stream_bytes;
    const std::uint8_t* later = (here ? stream + ahead : next_stream + (ahead - stream_bytes)) + 4 * q * apart;
#pragma GCC unroll 4
    for (std::size_t r = 4 * q; r < 4 * q + 4; r++, later += apart) {
      prefetch<kSpanBytes>(later);
      const std::uint8_t* span = of.rows[r] + s * kSpanBytes;
      if constexpr (kHalves) {
#pragma GCC unroll 2
        for (std::size_t u = 0; u < kSpanUnits; u++) {
          const __m512i bytes = _mm512_loadu_si512(pairs_of_codes(span, u));
          _mm512_store_si512(scratch.codes[k][u][r], _mm512_and_si512(bytes, _mm512_set1_epi8(15)));
          if (of.apart == 0) _mm512_store_si512(scratch.copies[k][u][r], bytes);
        }
      } else {
#pragma GCC unroll 8
        for (std::size_t c = 0; c < kSpanInputs / 32; c++) {
          constexpr std::size_t kOfUnit = unit_inputs(E) / 32;
          const Codes codes = codes_of<E>(span + c / kOfUnit * unit_bytes(E), c % kOfUnit);
          _mm256_store_si256(reinterpret_cast<__m256i*>(scratch.codes[k][c / 2][r] + c % 2 * 32), codes);
        }
      }
    }
    if constexpr (kBytes) byte_scales(of.rows + 4 * q, span_of, q);
  }

  // Scales and minima of four rows, as k_scales reads those of one.
  void byte_scales(const std::uint8_t* const* rows, const Span& span, std::size_t q) {
    const std::size_t at = span.of_row * kSpanBytes, room_of_minima = sums_of(inputs, 32);
    const auto all = [](__m128i x) { return _mm512_broadcast_i32x4(x); };
    __m512i four = _mm512_castsi128_si512(load16(rows[0] + at));
    four = _mm512_inserti32x4(four, load16(rows[1] + at), 1);
    four = _mm512_inserti32x4(four, load16(rows[2] + at), 2);
    four = _mm512_inserti32x4(four, load16(rows[3] + at), 3);
    const __m512i low_of = all(_mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m512i high_of = all(_mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11));
    const __m512i low = _mm512_srlv_epi32(_mm512_shuffle_epi8(four, low_of), all(_mm_setr_epi32(0, 0, 0, 4)));
    const __m512i high = _mm512_srli_epi16(_mm512_shuffle_epi8(four, high_of), 2);
    const __m512i low_bits = all(_mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    const __m512i six = _mm512_or_si512(_mm512_and_si512(low, low_bits), _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
    const __m128i order = kHalves ? _mm_setr_epi8(0, 0, 2, 2, 1, 1, 3, 3, 4, 4, 6, 6, 5, 5, 7, 7)
                                  : _mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    _mm512_store_si512(scratch.scales[span.parity()][4 * q], _mm512_shuffle_epi8(six, all(order)));
    alignas(kAlignment) std::uint64_t eights[8];
    _mm512_store_si512(eights, six);
    std::uint8_t* minimum = minima_of(span.group) + 4 * q * room_of_minima + span.of_row * 8;
#pragma GCC unroll 4
    for (std::size_t r = 0; r < 4; r++) std::memcpy(minimum + r * room_of_minima, eights + 2 * r + 1, 8);
  }

  std::uint8_t* minima_of(std::size_t g) { return scratch.minima(inputs) + g % 2 * kTileRows * sums_of(inputs, 32); }
  float* minimum_factors_of(std::size_t g) { return scratch.minimum_factors(inputs) + g % 2 * (spans() + 1) * kTileRows; }

  // The factors of a span of all rows.
  void read_factors(const Span& span) {
    if constexpr (kBytes) {
      alignas(kAlignment) std::uint32_t words[kTileRows];
#pragma GCC unroll 16
      for (std::size_t r = 0; r < kTileRows; r++) {
        std::memcpy(words + r, group[span.group % 2].rows[r] + span.of_row * kSpanBytes, 4);
      }
      const __m512i both = _mm512_load_si512(words);
      _mm512_store_ps(scratch.factors[span.parity()], _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)));
      const __m512 of_minima = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
      _mm512_storeu_ps(minimum_factors_of(span.group) + span.of_row * kTileRows, of_minima);
    }
  }

  // What the columns' sums of a row and a span are times, beside their units.
  __m512 scale_of(std::size_t r, const Span& span) const {
    if constexpr (kBytes) {
      const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(scratch.scales[span.parity()][r]));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), _mm512_set1_ps(scratch.factors[span.parity()][r]));
    } else {
      constexpr int kEach = kStep == kUnit ? 3 : 1;  // 2^this many columns have one scale
      const __m512i columns = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const float* of = scales + r * room + span.of_row * (kSpanInputs / kStep);
      return _mm512_permutexvar_ps(_mm512_srli_epi32(columns, kEach), _mm512_loadu_ps(of));  // reads 8 of them, or 2
    }
  }
  // Adds the sums of one token and a span, scaled: of four rows.
  void add(std::size_t t, const Span& span, std::size_t k, std::size_t q) {
    const __m512 unit = _mm512_loadu_ps(scratch.units(inputs) + (t * inputs / kUnit + span.of_row * kSpanUnits) * kColumns);
#pragma GCC unroll 4
    for (std::size_t r = 4 * q; r < 4 * q + 4; r++) {
      __m512 scale;
      if (t == 0) {
        scale = scale_of(r, span);
        if (tokens > 1) _mm512_store_ps(scratch.scaling[r], scale);
      } else {
        scale = _mm512_load_ps(scratch.scaling[r]);
      }
      const __m512 sums = _mm512_cvtepi32_ps(_mm512_load_si512(scratch.parts[k][r]));
      const __m512 before = _mm512_load_ps(scratch.sums[t][r]);
      _mm512_store_ps(scratch.sums[t][r], _mm512_fmadd_ps(_mm512_mul_ps(sums, unit), scale, before));
    }
  }

  // A quarter of the products of a span with one token.
  template <int kQuarter>
  void products(const Span& span, const std::uint8_t* digits) {
    const std::size_t k = span.parity(), s = span.of_row;
    constexpr std::size_t kDigitBytes = kColumns * 4;
    constexpr int kUnitOf = kQuarter / 2;
    constexpr bool kOdd = kQuarter % 2 == 1, kAsTheyAre = kHalves && !kOdd;
    memory_is_used();
    const std::uint8_t* codes = scratch.codes[k][kHalves ? kUnitOf : kQuarter][0];
    std::size_t between = kTileBytes;
    if constexpr (kAsTheyAre) {
      const RowGroup& of = group[span.group % 2];
      if (of.apart != 0) codes = pairs_of_codes(of.rows[0] + s * kSpanBytes, kUnitOf), between = of.apart;
      else codes = scratch.copies[k][kUnitOf][0];
    }
    load_tiles<kOdd>(codes, between, digits + kQuarter * kDigitTileBytes, kDigitBytes);
    add_products<kUnitOf, kOdd, !kHalves && is_signed(E)>();
    memory_is_used();
  }
  static void begin_products() {
    _tile_zero(0);
    _tile_zero(1);
  }
  void end_products(std::size_t k) {
    constexpr std::size_t kBetween = sizeof scratch.parts[0][0];
    memory_is_used();
    _tile_stored(0, scratch.parts[k][0], kBetween);
    _tile_stored(1, scratch.parts[k][0] + kColumns, kBetween);
    memory_is_used();
  }

  // y[token, output]: while tiles are multiplied, the next span's codes become bytes, and the sums of those before are scaled.
  void multiply(float* y, std::size_t y_stride) {
    const std::size_t token_bytes = inputs / kUnit * kUnitTiles * kDigitTileBytes, all = groups() * spans();
    Span span, after, before;
    const std::size_t row_bytes = static_cast<std::size_t>(m.row_bytes);
    stream = record + m.codes + begin * row_bytes;
    stream_rows = rows_of_stream(end - begin, row_bytes);
    stream_bytes = stream_rows * row_bytes;
    next_stream = next.codes ? next.codes : stream;
    next_stream_bytes = rows_of_stream(next.apart * kRows, next.row_bytes) * next.row_bytes;
    place(0);
    for (std::size_t q = 0; q < 4; q++) decode(span, q);
    read_factors(span);
    read_rows(0);
    std::size_t k = 0, token_before = 0;
    const auto quarter = [&](auto number, std::size_t t, bool more) {
      constexpr int kQuarter = decltype(number)::value;
      products<kQuarter>(span, scratch.digits() + t * token_bytes + span.of_row * kSpanUnits * kUnitTiles * kDigitTileBytes);
      if (span.number + t > 0) add(token_before, before, k ^ 1, kQuarter);
      if (more) decode(after, kQuarter);
    };
    for (; span.number < all; span = after) {
      after.step(spans());
      if (after.of_row == 0 && after.group < groups()) place(after.group);
      for (std::size_t t = 0; t < tokens; t++, k ^= 1) {
        const bool more = t == 0 && after.number < all;
        begin_products();
        quarter(std::integral_constant<int, 0>(), t, more);
        quarter(std::integral_constant<int, 1>(), t, more);
        quarter(std::integral_constant<int, 2>(), t, more);
        quarter(std::integral_constant<int, 3>(), t, more);
        if (more) read_factors(after);
        end_products(k);
        if (t == 0 && span.of_row == 0 && span.group > 0) {
          finish(span.group - 1, y, y_stride);
          read_rows(span.group);
        }
        before = span, token_before = t;
      }
    }
    for (std::size_t q = 0; q < 4; q++) add(token_before, before, k ^ 1, q);
    finish(groups() - 1, y, y_stride);
  }

  void finish(std::size_t g, float* y, std::size_t y_stride) {
    const RowGroup& of = group[g % 2];
    for (std::size_t t = 0; t < tokens; t++) {
      const float* of_steps = scratch.inputs(inputs) + t * sums_of(inputs, kStep);
      float* to = y + t * y_stride + of.first;
      for (std::size_t q = 0; 4 * q < of.count; q++) {
        __m512 four[4];
        for (std::size_t i = 0; i < 4; i++) {
          const std::size_t r = 4 * q + i;
          four[i] = _mm512_load_ps(scratch.sums[t][r]);
          if constexpr (takes_minima_off(E)) {
            for (std::size_t s = 0; s < sums_of(inputs, kStep); s += 16) {
              four[i] = _mm512_fmadd_ps(_mm512_loadu_ps(of_steps + s), minimum_of(g, r, s), four[i]);
            }
          }
        }
        float totals[4];
        sum4_avx512(four, totals);
        for (std::size_t i = 0; i < 4 && 4 * q + i < of.count; i++) to[(4 * q + i) * of.row_apart] = totals[i];
      }
    }
  }
  __m512 minimum_of(std::size_t g, std::size_t r, std::size_t step) {
    if constexpr (kBytes) {
      const std::uint8_t* bytes = minima_of(g) + r * sums_of(inputs, 32) + step;
      const float* factor = minimum_factors_of(g) + step / 8 * kTileRows + r;
      const __m512 factors = _mm512_mask_broadcastss_ps(_mm512_set1_ps(-factor[0]), 0xff00, _mm_set_ss(-factor[kTileRows]));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load16(bytes))), factors);
    } else {
      return _mm512_loadu_ps(minima + r * room + step);
    }
  }
};

// ------------------------------------------------------------------ a matrix
// A row has two spans or more: what belongs to a group of rows is used until the first span of the next was multiplied.
inline bool is_in_spans(const Matrix& m) {
  const std::size_t inputs = static_cast<std::size_t>(m.inputs);
  return inputs % kSpanInputs == 0 && inputs > kSpanInputs;
}

template <Encoding E>
void multiply_bytes(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x,
                    std::size_t x_bytes, std::size_t n, const Scratch& scratch, const Place& next, float* y,
                    std::size_t y_stride) {
  using Sixteen = SixteenRows<E>;
  const std::size_t inputs = static_cast<std::size_t>(m.inputs);
  if (!is_in_spans(m)) {
    return multiplies_avx512bf16()[E](m, record, begin, end, x, x_bytes, n, scratch, next, y, y_stride);
  }
  const Tiles tiles(kColumns * 4);
  ByteScratch& own = *static_cast<ByteScratch*>(scratch.rest);
  const std::size_t units = inputs / kUnit, steps = sums_of(inputs, Sixteen::kStep);
  float* minima = scratch.tile + kTileRows * scratch.steps;
  Sixteen sixteen{m, record, begin, end, next, own, inputs, 0, scratch.steps, scratch.tile, minima, {}, 0, nullptr, nullptr, 0, 0};
  for (std::size_t g = 0; Sixteen::kBytes && g < 2; g++) {  // behind the last span, whose steps may be half of a vector
    std::memset(sixteen.minimum_factors_of(g) + inputs / kSpanInputs * kTileRows, 0, kTileRows * sizeof(float));
  }
  std::size_t left = (n + kDigitTokens - 1) / kDigitTokens;
  for (std::size_t first = 0; first < n; first += sixteen.tokens, left--) {
    sixteen.tokens = (n - first + left - 1) / left;
    const std::uint8_t* tokens = static_cast<const std::uint8_t*>(x) + first * x_bytes;
    const std::int32_t step_of_sums = takes_minima_off(E) ? static_cast<std::int32_t>(Sixteen::kStep) : 0;
    const KeptDigits wanted{scratch.call, tokens, sixteen.tokens, Sixteen::kDigits, step_of_sums};
    if (std::memcmp(&own.kept, &wanted, sizeof wanted) != 0) {
      for (std::size_t t = 0; t < sixteen.tokens; t++) {
        const auto* row = reinterpret_cast<const Avx512Bf16::X*>(tokens + t * x_bytes);
        float* sums = own.inputs(inputs) + t * steps;
        if (takes_minima_off(E)) std::memset(sums, 0, steps * sizeof(float));
        for (std::size_t u = 0, at = t * units; u < units; u++, at++) {
          std::uint8_t* tiles_of_unit = own.digits() + at * kUnitTiles * kDigitTileBytes;
          digits_of_unit<Sixteen::kDigits, Sixteen::kStep, takes_minima_off(E)>(
              row + u * kUnit, tiles_of_unit, own.units(inputs) + at * kColumns, sums + u * kUnit / Sixteen::kStep);
        }
      }
      own.kept = wanted;
    }
    sixteen.multiply(y + first * y_stride, y_stride);
  }
}

// Rows of a task: streams are long, for a core's prefetcher begins anew in each.
inline std::size_t rows_of_task(std::size_t row_bytes) {
  return kTileRows * least(kStreamRows, (kStreamTarget + row_bytes - 1) / row_bytes);
}

// Null for encodings that are not multiplied as bytes.
template <Encoding E>
constexpr Multiply multiply_of_bytes() {
  if constexpr (in_bytes(E)) return multiply_bytes<E>;
  else return nullptr;
}

}  // namespace
}  // namespace vismoe
