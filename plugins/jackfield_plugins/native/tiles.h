// What products with weights in units of 64 outputs have in common: how much is worked on together, and
// how outputs are written.
#pragma once
#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "together.h"
#include "vectors.h"

constexpr int LANES = 16;  // outputs of a block
constexpr int UNIT = 4;    // blocks that lie side by side: the outputs of a task
constexpr int OUTPUTS = UNIT * LANES;
constexpr int WIDE = Vector<float>::lanes;  // outputs of a vector
constexpr int PARTS = LANES / WIDE;         // vectors of a block
constexpr int64_t CHUNK = 48;               // rows of a task: with a unit's weights they fit into a cache
constexpr int AHEAD = 6144;                 // bytes of weights that are asked for before they are needed

// How many units so many rows read side by side. Processors with tiles read four streams faster than one, by a quarter
// of Q4_0, also where the sums of two rows do not all fit into the registers; of four rows they cost more than that.
#if defined(WITH_TILES)
constexpr int beside(int64_t rows) { return rows <= 2 ? 4 : 1; }
#else
constexpr int beside(int64_t) { return 1; }
#endif

// Asks for `count` numbers of one of `side` streams, before their turn: weights, or scales that are a `part` of them.
// Each of several streams is read the more slowly, so less far ahead.
template <int side, int part = 1, class T>
inline ALWAYS_INLINE void ask_ahead(const T* from, int64_t count) {
    const char* const own = reinterpret_cast<const char*>(from);
    const int64_t bytes = count * sizeof(T);
    if constexpr (side == 1) ask_for(own + AHEAD / part, bytes);
    else  // of several streams, few lines at a time are on their way to the first cache
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(own + AHEAD / 3 / part + at, 0, 3);
}

// The tasks of a product: of each unit of outputs as many as there are chunks of rows.
inline int64_t chunks_of(int64_t rows, int64_t chunk) { return (rows + chunk - 1) / chunk; }
inline int64_t tasks_of(int64_t out_features, int64_t rows, int64_t chunk) {
    return (out_features + OUTPUTS - 1) / OUTPUTS * chunks_of(rows, chunk);
}

// Calls what(unit, some, from, count) for those from `first` up to `end`: `some` units at a time, up to `side`, and
// `count` rows from row `from` on. More than one unit are for few rows, which are one chunk.
template <class What>
inline void in_units(int64_t rows, int64_t chunk, int64_t first, int64_t end, int64_t side, What what) {
    const int64_t chunks = chunks_of(rows, chunk);
    for (int64_t some; first < end; first += some) {
        some = chunks == 1 ? std::min(end - first, side) : 1;
        const int64_t from = first % chunks * chunk;
        what(first / chunks, some, from, std::min(chunk, rows - from));
    }
}

// Calls what(side, unit) for `some` units from `unit` on: for `side` of them at once, or for one after the other.
template <int side, class What>
inline ALWAYS_INLINE void side_by_side(int64_t unit, int64_t some, What what) {
    if constexpr (side > 1)
        if (some == side) return what(std::integral_constant<int, side>(), unit);
    for (; some; unit++, some--) what(std::integral_constant<int, 1>(), unit);
}

// How many rows are worked on together, and how many blocks; their sums have to fit into the registers.
#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // of numbers in bfloat16 are multiplied by one instruction
// Few rows take all blocks of a unit, so that its weights are read once, in the order in which they lie.
constexpr int blocks_for(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr bool PAIRS = false;
constexpr int blocks_for(int) { return 1; }
#endif

constexpr int ACROSS = 2;                   // vectors of outputs of a tile of many rows, as floats
constexpr int MANY = WIDTH == 64 ? 12 : 6;  // rows of it: their sums fit into the registers

// Calls what(size, blocks, rows, block, from, first) for `count` rows in tiles, and for each tile as often as it takes
// to get through a unit, `blocks` at a time. `size`, a constant, is how many rows a tile is compiled for: the least of
// `sizes` with room for the rows that are left, or one less where more than a quarter of it would be for nothing.
// `first`: nobody in this task has read the unit.
template <int (*blocks_in)(int), int... sizes, class What>
inline void in_tiles(std::integer_sequence<int, sizes...>, int64_t from, int64_t count, What what) {
    constexpr int all[] = {sizes...};
    bool first = true;
    for (int64_t rows; count; from += rows, count -= rows) {
        size_t at = 0;
        while (at + 1 < sizeof...(sizes) && all[at] < count) at++;
        if (at && 3 * all[at] > 4 * count) at--;
        rows = std::min<int64_t>(count, all[at]);
        const auto tile = [&](auto size) ALWAYS_INLINE {
            constexpr int blocks = blocks_in(size);
            for (int block = 0; block < UNIT; block += blocks, first = false)
                what(size, std::integral_constant<int, blocks>(), rows, block, from, first);
            return true;
        };
        (void)((sizes == all[at] && tile(std::integral_constant<int, sizes>())) || ...);
    }
}

inline float wide(bfloat16 x) { return as<float>(uint32_t(x.bits) << 16); }
inline float wide(float x) { return x; }

// Two inputs of the outputs in a vector's lanes: `even` and `odd` as floats.
struct Two {
    Vec<float> even, odd;
};

template <class T>
inline ALWAYS_INLINE void add(Vec<float>& sum, const Two& weight, const T* input) {
    sum = fused(weight.even, everywhere(wide(input[0])), sum);
    sum = fused(weight.odd, everywhere(wide(input[1])), sum);
}

inline ALWAYS_INLINE Vec<float> total_of(Vec<float> sum) { return sum; }

#if defined(__AVX512BF16__)

// Each lane has two inputs of an output, the even one in its lower half.
inline ALWAYS_INLINE void add(Vec<float>& sum, __m512bh weight, const bfloat16* input) {
    sum = _mm512_dpbf16_ps(sum, weight, (__m512bh)_mm512_set1_epi32(as<int32_t>(read<uint32_t>(input))));
}

inline ALWAYS_INLINE void add(Vec<float>& sum, __m512bh weight, const float* input) {
    Words both = as<Words>(weight);
    add(sum, Two{as<Vec<float>>(both << 16), as<Vec<float>>(both & 0xffff0000)}, input);
}

#endif

// sums[r * ACROSS + i]: the products of `inputs` numbers of row r with vector i of weights, `weight` [inputs, ACROSS].
template <int inputs>
__attribute__((noinline)) void multiply_many(const Vec<float>* weight, const float* const* row, Vec<float>* sums) {
    Vec<float> sum[MANY * ACROSS];
    each<MANY * ACROSS>([&](auto i) ALWAYS_INLINE { sum[i] = Vec<float>{}; });
    for (int at = 0; at < inputs; at++)
        each<MANY>([&](auto r) ALWAYS_INLINE {
            const Vec<float> x = everywhere(row[r][at]);
            each<ACROSS>([&](auto i) ALWAYS_INLINE {
                sum[r * ACROSS + i] = fused(weight[at * ACROSS + i], x, sum[r * ACROSS + i]);
            });
        });
    each<MANY * ACROSS>([&](auto i) ALWAYS_INLINE { sums[i] = sum[i]; });
}

// Writes the sums of `WIDE` outputs from `output` of `all` on, with the bias that there may be; none
// beyond the last.
template <class T>
inline void write_outputs(Vec<float> total, int64_t output, int64_t all, const T* bias, T* out) {
    const int64_t count = all - output;
    if (count >= WIDE) {
        store(bias ? total + load(bias + output) : total, out + output);
    } else if (count > 0) {
        T some[WIDE] = {}, rounded[WIDE];
        if (bias) std::copy_n(bias + output, count, some);
        store(total + load(some), rounded);
        std::copy_n(rounded, count, out + output);
    }
}
