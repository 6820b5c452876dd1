// A linear layer whose weights are small integers with one scale a group; bfloat16 activations,
// float32 sums.
//
// One token reads every weight once, so the time to read them is the least there can be, and what
// is done to a weight has to fit into it. Hence the layout: a block is 16 outputs, one a 32-bit
// lane, and a lane holds neighbouring inputs, even ones in its lower half and odd ones in its
// higher. Shifting by 4, 8 or 12 bits brings the next pair into place, where
// the 4 lowest bits of each half are an index into a table of bfloat16; the product with a pair of
// activations is one instruction (VDPBF16PS). Weights of 8 bits are two such nibbles, the higher
// one with a table of multiples of 16.
//
// Sums run over the inputs of a group in their order, then over the groups in theirs, however many
// rows there are: a row's result does not depend on what else is in the batch.
#include <algorithm>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int LANES = 16;           // outputs of a block
constexpr int UNIT = 4;             // blocks that lie side by side: the outputs of a task
constexpr int BYTES = 64;           // of a block and a step
constexpr int PARTS = LANES / Vector<float>::lanes;
constexpr int64_t CHUNK = 48;       // rows of a task: with a unit's weights they fit into a cache
constexpr int64_t WORTH = 1 << 17;  // multiplications that pay for waking a further thread
constexpr int FEW = 8;              // rows, up to which memory is waited for
constexpr int AHEAD = 6144;         // bytes of weights that are asked for before they are needed

// What Python packs, field by field. A unit is 64 outputs; of the last one some may not exist.
struct Call {
    const bfloat16* input;  // [rows, in_features]
    bfloat16* out;          // [rows, out_features]
    const uint8_t* weight;  // [units, steps, 4 blocks, 16 outputs, 4 bytes]
    const bfloat16* scale;  // [units, groups, 4 blocks, 16 outputs]
    const bfloat16* bias;   // [out_features], or none
    int64_t rows, in_features, out_features, group_size, threads;
};

// How a 32-bit lane is read in four turns: which pair of activations, and the table's values.
template <int bits>
struct Format {
    static constexpr int inputs = 32 / bits;  // of a step
    static constexpr int pair(int turn) { return bits == 4 ? turn : turn / 2; }
    static constexpr int factor(int turn) { return bits == 8 && turn % 2 ? 16 : 1; }
    static constexpr int offset(int turn) { return bits == 8 && turn % 2 == 0 ? 0 : 8; }
};

// Rows and blocks that are worked on together; their sums have to fit into the registers. Few rows
// take all blocks of a unit, so that its weights are read in the order in which they lie.
#if defined(__AVX512BF16__)
constexpr int rows_for(int64_t rows) { return rows <= FEW ? 4 : 8; }
constexpr int blocks_for(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int rows_for(int64_t) { return 4; }
constexpr int blocks_for(int) { return 1; }
#endif

#if defined(__AVX512BF16__)

// The values of a nibble, twice: bit 4 of an index belongs to the next nibble and must not matter.
template <int bits>
struct Tables {
    alignas(64) uint16_t values[2][32];
    Tables() {
        for (int turn = 0; turn < 2; turn++)
            for (int i = 0; i < 32; i++) {
                int value = Format<bits>::factor(turn) * (i % 16 - Format<bits>::offset(turn));
                values[turn][i] = as<uint32_t>(float(value)) >> 16;
            }
    }
};
template <int bits>
const Tables<bits> tables;

// sums += the products of one group: of each row with each block.
template <int bits, int rows, int blocks>
inline ALWAYS_INLINE void add_group(const uint8_t* weight, const bfloat16* input, int64_t stride,
                                    int64_t steps, Vec<float>* sums) {
    using F = Format<bits>;
    const __m512i even = _mm512_load_si512(tables<bits>.values[0]);
    const __m512i odd = bits == 4 ? even : _mm512_load_si512(tables<bits>.values[1]);
    for (int64_t step = 0; step < steps; step++) {
        __m512i packed[blocks];
        each<blocks>([&](auto b) ALWAYS_INLINE {
            __builtin_prefetch(weight + b * BYTES + AHEAD);
            packed[b] = _mm512_loadu_si512(weight + b * BYTES);
        });
        each<4>([&](auto turn) ALWAYS_INLINE {
            __m512i value[blocks];
            each<blocks>([&](auto b) ALWAYS_INLINE {
                __m512i index = _mm512_srli_epi16(packed[b], 4 * turn);
                value[b] = _mm512_permutexvar_epi16(index, turn % 2 ? odd : even);
            });
            each<rows>([&](auto r) ALWAYS_INLINE {
                const bfloat16* pair = input + r * stride + 2 * F::pair(turn);
                __m512i both = _mm512_set1_epi32(as<int32_t>(read<uint32_t>(pair)));
                each<blocks>([&](auto b) ALWAYS_INLINE {
                    Vec<float>& sum = sums[r * blocks + b];
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)value[b], (__m512bh)both);
                });
            });
        });
        weight += UNIT * BYTES;
        input += F::inputs;
    }
}

#else

inline float wide(bfloat16 x) { return as<float>(uint32_t(x.bits) << 16); }

template <int bits, int rows, int blocks>
inline ALWAYS_INLINE void add_group(const uint8_t* weight, const bfloat16* input, int64_t stride,
                                    int64_t steps, Vec<float>* sums) {
    using F = Format<bits>;
    for (int64_t step = 0; step < steps; step++) {
        each<blocks * PARTS>([&](auto part) ALWAYS_INLINE {
            Words packed = read<Words>(weight + part * WIDTH);
            each<4>([&](auto turn) ALWAYS_INLINE {
                Words low = packed >> 4 * turn & 15, high = packed >> (16 + 4 * turn) & 15;
                const int factor = F::factor(turn), offset = F::offset(turn);
                auto first = __builtin_convertvector((as<Integers>(low) - offset) * factor, Vec<float>);
                auto second = __builtin_convertvector((as<Integers>(high) - offset) * factor, Vec<float>);
                each<rows>([&](auto r) ALWAYS_INLINE {
                    const bfloat16* pair = input + r * stride + 2 * F::pair(turn);
                    Vec<float>& sum = sums[r * blocks * PARTS + part];
                    sum += first * wide(pair[0]);
                    sum += second * wide(pair[1]);
                });
            });
        });
        weight += UNIT * BYTES;
        input += F::inputs;
    }
}

#endif

template <int bits>
class Linear {
    const Call& call;
    const int64_t units, chunks, steps, groups;  // steps are those of a group

   public:
    explicit Linear(const Call& call)
        : call(call), units((call.out_features + UNIT * LANES - 1) / (UNIT * LANES)),
          chunks((call.rows + CHUNK - 1) / CHUNK), steps(call.group_size / Format<bits>::inputs),
          groups(call.in_features / call.group_size) {}

    void run() {
        int64_t products = call.rows * call.in_features * call.out_features;
        int64_t threads = std::min(call.threads, products / WORTH + 1);
        Tasks(units * chunks, threads, [this](int64_t task) { work(task); });
    }

   private:
    void work(int64_t task) const {
        int64_t from = task % chunks * CHUNK, count = std::min(CHUNK, call.rows - from);
        const int64_t most = rows_for(call.rows);
        // Tiles as even as can be, since each has to unpack the weights.
        for (int64_t tiles = (count + most - 1) / most; tiles; tiles--) {
            int64_t rows = (count + tiles - 1) / tiles;
            by_rows<rows_for(INT64_MAX)>(rows, task / chunks, from);
            from += rows;
            count -= rows;
        }
    }

    template <int most>
    void by_rows(int64_t rows, int64_t unit, int64_t from) const {
        if (rows == most) return tile<most>(unit, from);
        if constexpr (most > 1) by_rows<most - 1>(rows, unit, from);
    }

    template <int rows>
    void tile(int64_t unit, int64_t from) const {
        constexpr int blocks = blocks_for(rows);
        for (int block = 0; block < UNIT; block += blocks) multiply<rows, blocks>(unit, block, from);
    }

    template <int rows, int blocks>
    void multiply(int64_t unit, int block, int64_t from) const {
        const uint8_t* weight = call.weight + (unit * groups * steps * UNIT + block) * BYTES;
        const bfloat16* scale = call.scale + (unit * groups * UNIT + block) * LANES;
        const bfloat16* input = call.input + from * call.in_features;
        constexpr int parts = blocks * PARTS;
        Vec<float> total[rows * parts];
        each<rows * parts>([&](auto i) ALWAYS_INLINE { total[i] = Vec<float>{}; });
        for (int64_t group = 0; group < groups; group++) {
            for (int line = 0; line < UNIT * LANES * 2; line += BYTES)
                __builtin_prefetch(reinterpret_cast<const char*>(scale) + AHEAD / 6 + line);
            Vec<float> sums[rows * parts];
            each<rows * parts>([&](auto i) ALWAYS_INLINE { sums[i] = Vec<float>{}; });
            add_group<bits, rows, blocks>(weight, input, call.in_features, steps, sums);
            each<parts>([&](auto part) ALWAYS_INLINE {
                Vec<float> factor = load(scale + part * Vector<float>::lanes);
                each<rows>([&](auto r) ALWAYS_INLINE {
                    total[r * parts + part] += sums[r * parts + part] * factor;
                });
            });
            weight += steps * UNIT * BYTES;
            scale += UNIT * LANES;
            input += call.group_size;
        }
        each<rows * parts>([&](auto i) ALWAYS_INLINE {
            int64_t output = (unit * UNIT + block) * LANES + i % parts * Vector<float>::lanes;
            write(total[i], output, from + i / parts);
        });
    }

    void write(Vec<float> total, int64_t output, int64_t row) const {
        constexpr int64_t lanes = Vector<float>::lanes;
        bfloat16* out = call.out + row * call.out_features + output;
        const int64_t count = call.out_features - output;
        if (count >= lanes) {
            store(call.bias ? total + load(call.bias + output) : total, out);
        } else if (count > 0) {
            bfloat16 bias[lanes] = {}, rounded[lanes];
            if (call.bias) std::copy_n(call.bias + output, count, bias);
            store(total + load(bias), rounded);
            std::copy_n(rounded, count, out);
        }
    }
};

}  // namespace

extern "C" {
bool linear_4_bits(const Call* call) { return Linear<4>(*call).run(), true; }
bool linear_8_bits(const Call* call) { return Linear<8>(*call).run(), true; }
}
