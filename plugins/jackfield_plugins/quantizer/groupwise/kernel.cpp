// A linear layer whose weights are integers of 4 or 8 bits with one scale a group; activations of
// bfloat16, of 8 bits also of float32; float32 sums.
//
// One token reads every weight once, so the time to read them is the least there can be, and what
// is done to a weight has to fit into it. Hence the layout: a block is 16 outputs, one a 32-bit
// lane, and a lane holds neighbouring inputs, even ones in its lower half and odd ones in its
// higher, so that two of them are one operand of VDPBF16PS. Of 4 bits, shifting brings the next pair
// into place, where the 4 lowest bits of each half are an index into a table of bfloat16. Of 8 bits,
// a byte is put behind the exponent of 2^23, which makes it a float32 without a conversion; bfloat16 is
// its upper half, exact for a whole number of 8 bits. Where there is no such instruction, activations in bfloat16
// are rounded to 16 bits (rounded.h).
//
// Sums run over the inputs of a group in their order, then over the groups in theirs, however many
// rows there are: a row's result does not depend on what else is in the batch.
#include "rounded_groups.h"

namespace {

constexpr int inputs_of(int bits) { return 32 / bits; }  // of a step

// The lowest bits of each lane, less half of their range.
template <int bits>
inline ALWAYS_INLINE Vec<float> whole(Words stored) {
    const float offset = 0x1p23f + (1 << (bits - 1));
    return as<Vec<float>>((stored & ((1 << bits) - 1)) | 0x4b000000) - offset;
}

// Pair `turn` of a step's inputs.
template <int bits, int turn>
inline ALWAYS_INLINE Two two(Words packed) {
    return {whole<bits>(packed >> (bits * turn)), whole<bits>(packed >> (16 + bits * turn))};
}

#if defined(__AVX512BF16__)

// The values of a nibble, twice: bit 4 of an index belongs to the next nibble and must not matter.
struct Table {
    alignas(64) uint16_t values[32];
    Table() {
        for (int i = 0; i < 32; i++) values[i] = as<uint32_t>(float(i % 16 - 8)) >> 16;
    }
};
const Table table;

template <int bits, int turn>
inline ALWAYS_INLINE __m512bh numbers(Words packed, const bfloat16*) {
    if constexpr (bits == 4) {
        __m512i index = _mm512_srli_epi16(as<__m512i>(packed), 4 * turn);
        return (__m512bh)_mm512_permutexvar_epi16(index, _mm512_load_si512(table.values));
    } else {
        Two both = two<bits, turn>(packed);
        return as<__m512bh>((as<Words>(both.even) >> 16) | (as<Words>(both.odd) & 0xffff0000));
    }
}

#endif

template <int bits, int turn>
inline ALWAYS_INLINE Two numbers(Words packed, const float*) { return two<bits, turn>(packed); }

// sums += the products of one group: of each row with each part of a block. `ask`: for weights before their turn.
template <int bits, int rows, int parts, class T>
inline ALWAYS_INLINE void add_group(const uint8_t* weight, const T* input, int64_t stride, int64_t steps, bool ask,
                                    Vec<float>* sums) {
    for (int64_t step = 0; step < steps; step++) {
        if (ask) ask_for(weight + AHEAD, UNIT * BYTES);
        Words packed[parts];
        each<parts>([&](auto part) ALWAYS_INLINE {
            packed[part] = read<Words>(weight + part * WIDTH);
        });
        each<inputs_of(bits) / 2>([&](auto turn) ALWAYS_INLINE {
            decltype(numbers<bits, 0>(packed[0], input)) value[parts];
            each<parts>([&](auto part) ALWAYS_INLINE { value[part] = numbers<bits, turn>(packed[part], input); });
            each<rows>([&](auto r) ALWAYS_INLINE {
                each<parts>([&](auto part) ALWAYS_INLINE {
                    add(sums[r * parts + part], value[part], input + r * stride + 2 * turn);
                });
            });
        });
        weight += UNIT * BYTES;
        input += inputs_of(bits);
    }
}

template <int bits, class T>
class Linear {
    const Call& call;
    const int64_t units, chunks, steps, groups;  // steps are those of a group

   public:
    explicit Linear(const Call& call)
        : call(call), units((call.out_features + OUTPUTS - 1) / OUTPUTS),
          chunks((call.rows + CHUNK - 1) / CHUNK), steps(call.group_size / inputs_of(bits)),
          groups(call.in_features / call.group_size) {}

    int64_t tasks() const { return units * chunks; }

    void task(int64_t at) const {
        int64_t from = at % chunks * CHUNK, count = std::min(CHUNK, call.rows - from);
        in_tiles<blocks_for>(Sizes(), from, count,
                             [&](auto size, auto blocks, int64_t, int block, int64_t row, bool first) {
                                 multiply<size, blocks>(at / chunks, block, row, first);
                             });
    }

   private:
    using Sizes = std::conditional_t<PAIRS, std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 7, 8>,
                                     std::integer_sequence<int, 1, 2, 3, 4>>;

    template <int rows, int blocks>
    void multiply(int64_t unit, int block, int64_t from, bool first) const {
        const uint8_t* weight = call.weight + (unit * groups * steps * UNIT + block) * BYTES;
        const bfloat16* scale = call.scale + (unit * groups * UNIT + block) * LANES;
        const T* input = static_cast<const T*>(call.input) + from * call.in_features;
        constexpr int parts = blocks * PARTS;
        Vec<float> total[rows * parts];
        each<rows * parts>([&](auto i) ALWAYS_INLINE { total[i] = Vec<float>{}; });
        for (int64_t group = 0; group < groups; group++) {
            if (first) ask_for(reinterpret_cast<const char*>(scale) + AHEAD / 6, OUTPUTS * sizeof *scale);
            Vec<float> sums[rows * parts];
            each<rows * parts>([&](auto i) ALWAYS_INLINE { sums[i] = Vec<float>{}; });
            add_group<bits, rows, parts>(weight, input, call.in_features, steps, first, sums);
            each<parts>([&](auto part) ALWAYS_INLINE {
                Vec<float> factor = load(scale + part * WIDE);
                each<rows>([&](auto r) ALWAYS_INLINE {
                    Vec<float>& all = total[r * parts + part];
                    all = fused(sums[r * parts + part], factor, all);
                });
            });
            weight += steps * UNIT * BYTES;
            scale += OUTPUTS;
            input += call.group_size;
        }
        each<rows * parts>([&](auto i) ALWAYS_INLINE {
            int64_t output = (unit * UNIT + block) * LANES + i % parts * WIDE;
            T* out = static_cast<T*>(call.out) + (from + i / parts) * call.out_features;
            write_outputs(total[i], output, call.out_features, static_cast<const T*>(call.bias), out);
        });
    }
};

// Of 4 bits there are no products with float32.
bool is_known(const Call& call) { return call.bits == 8 || !call.floats; }

struct Product {
    const Call& call;

    explicit Product(const Call& call) : call(call) {}
    int64_t tasks() const {
        return as([](auto linear) { return linear.tasks(); });
    }
    void task(int64_t at) const {
        as([at](auto linear) { return linear.task(at), 0; });
    }

   private:
    template <class What>
    int64_t as(What what) const {
        if constexpr (PAIRS) {
            if (call.bits == 4) return what(Linear<4, bfloat16>(call));
            if (!call.floats) return what(Linear<8, bfloat16>(call));
        }
        return what(Linear<8, float>(call));
    }
};

}  // namespace

extern "C" {
// Each returns whether it can.
bool groupwise_linears(const Call* const* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!is_known(*calls[i])) return false;
    const bool alike = std::all_of(calls, calls + count, [&](auto one) { return one->floats == calls[0]->floats; });
    if (!alike) {
        for (int64_t i = 0; i < count; i++) groupwise_linears(calls + i, 1);
    } else if (PAIRS || calls[0]->floats) {
        together<Product>(calls, count);
    } else {
        rounded_together<RoundedProduct<int16_t>, int16_t>(calls, count);
    }
    return true;
}
bool groupwise_linear(const Call* call) { return groupwise_linears(&call, 1); }
}
