// Few rows times a matrix whose rows are outputs, `[out_features, in_features]` as torch has it.
//
// One row reads every weight once, so the time to read them is the least there can be. Where there are tiles, these
// multiply bfloat16 (`Tiled`). Else a task is as many outputs as a vector has lanes. The weights of a few of them side
// by side come from memory once for all rows: tiles of rows take turns at them, and all but the first find them in the
// nearest caches. The sums of a row run over the inputs in one order, however many rows there are: its bits depend
// neither on the others nor on the threads.
#pragma once
#include <algorithm>
#include <vector>

#include "amx.h"
#include "numbers.h"
#include "together.h"

struct Linear {
    const char *input, *weight, *bias;  // [rows, in_features], [out_features, in_features], or none
    char* out;                          // [rows, out_features]
    int64_t rows, in_features, out_features, input_row, weight_row, out_row, threads;
};

// The same of a matrix whose rows are inputs, `[in_features, out_features]`, as GPT-2 has it:
// outputs side by side are the lanes of a few vectors, and inputs come one after the other.
template <class T>
class Turned {
    using C = typename Wide<T>::type;
    static constexpr int lanes = Vector<C>::lanes, side = 4;
    static constexpr int64_t wide = side * lanes;

    const Linear& call;

   public:
    explicit Turned(const Linear& call) : call(call) {}

    int64_t tasks() const { return (call.out_features + wide - 1) / wide; }

    void task(int64_t at) const {
        int64_t row = 0;
        for (; row + 4 <= call.rows; row += 4) block<4>(at * wide, row);
        if (call.rows - row >= 2) block<2>(at * wide, row), row += 2;
        if (call.rows - row >= 1) block<1>(at * wide, row);
    }

   private:
    template <int rows>
    void block(int64_t first, int64_t row) const {
        const int64_t count = std::min(wide, call.out_features - first);
        Vec<C> sum[rows * side];
        each<rows * side>([&](auto i) ALWAYS_INLINE { sum[i] = Vec<C>{}; });
        for (int64_t at = 0; at < call.in_features; at++) {
            const T* w = reinterpret_cast<const T*>(call.weight) + at * call.weight_row + first;
            T end[wide] = {};  // what is missing counts for nothing
            if (count < wide) w = std::copy_n(w, count, end) - count;
            Vec<C> some[side];
            each<side>([&](auto o) ALWAYS_INLINE { some[o] = load(w + o * lanes); });
            each<rows>([&](auto r) ALWAYS_INLINE {
                const C x = C(wide_of(row + r, at));
                each<side>([&](auto o) ALWAYS_INLINE { sum[r * side + o] += some[o] * x; });
            });
        }
        for (int r = 0; r < rows; r++)
            for (int64_t i = 0; i < count; i++) {
                const C value = sum[r * side + i / lanes][i % lanes];
                const T* bias = reinterpret_cast<const T*>(call.bias);
                T* out = reinterpret_cast<T*>(call.out) + (row + r) * call.out_row + first + i;
                narrow(bias ? value + C(::wide(bias[first + i])) : value, *out);
            }
    }

    auto wide_of(int64_t row, int64_t at) const {
        return ::wide((reinterpret_cast<const T*>(call.input) + row * call.input_row)[at]);
    }
};

// `Out`: the dtype of bias and outputs.
template <class T, class Out = T>
class Product {
    using C = typename Wide<T>::type;
    static constexpr int lanes = Vector<C>::lanes;
    // Where an output has at most `SHORT` bytes, weights are asked for `AHEAD` bytes before their turn, in the
    // order in which they lie. Of longer ones, those of the next outputs side by side are asked for. Where there are
    // several tiles, each asks for a part of the next task's.
    static constexpr int64_t AHEAD = 16384, SHORT = 2048;
    const Linear& call;

   public:
#if defined(__AVX512BF16__)
    static constexpr bool pairs = std::is_same_v<T, bfloat16>;  // of numbers are multiplied by one instruction
#else
    static constexpr bool pairs = false;
#endif

    explicit Product(const Linear& call) : call(call) {}

    int64_t tasks() const { return (call.out_features + lanes - 1) / lanes; }

    // Up to `side` rows are one tile, also where their sums do not all fit into registers. More are even tiles.
    void task(int64_t at) const {
        static thread_local std::vector<Vec<C>> room;  // [rows, turns]: sums of `side` outputs side by side
        room.resize(std::max<size_t>(room.size(), call.rows * turns));
        const int64_t tiles = call.rows <= side ? 1 : (call.rows + MOST - 1) / MOST;
        for (int turn = 0; turn < turns; turn++) {
            int64_t row = 0;
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t rows = (call.rows - row + tiles - tile - 1) / (tiles - tile);
                Vec<C>* const found = room.data() + row * turns + turn;
                each<std::max(MOST, side)>([&](auto i) ALWAYS_INLINE {
                    if (rows == i + 1) block<i + 1>(at * lanes + turn * side, row, tile, tiles, found);
                });
                row += rows;
            }
        }
        const int64_t count = std::min<int64_t>(lanes, call.out_features - at * lanes);
        for (int64_t row = 0; row < call.rows; row++)
            write(sums<C, side>(room.data() + row * turns), at * lanes, row, count);
    }

   private:
    static constexpr int step = pairs ? 2 * lanes : lanes;
    static constexpr int side = std::min(4, lanes);  // a vector of 16 bytes has two doubles
    static constexpr int turns = lanes / side;
    static_assert(lanes % side == 0);
    // Rows of a tile, whose sums fit into the registers; where weights have to be widened, that is done for
    // more rows together than fit.
#if defined(__AVX512F__) || defined(__aarch64__)
    static constexpr int MOST = 6;
#else
    static constexpr int MOST = sizeof(T) < sizeof(C) ? 6 : 3;
#endif

    const T* weight(int64_t output) const {  // what is behind the last is not written
        const int64_t at = std::min(output, call.out_features - 1);
        return reinterpret_cast<const T*>(call.weight) + at * call.weight_row;
    }
    const T* input(int64_t row) const {
        return reinterpret_cast<const T*>(call.input) + row * call.input_row;
    }

    // Sums are added up before they leave the registers, as far as `side` outputs can be.
    template <int rows>
    void block(int64_t first, int64_t row, int64_t tile, int64_t tiles, Vec<C>* found) const {
        Vec<C> sum[rows * side] = {};
        dots<rows>(first, row, tile, tiles, sum);
        each<rows>([&](auto r) ALWAYS_INLINE { found[r * turns] = sums<C, 1, side>(sum + r * side); });
    }

    template <int rows>
    ALWAYS_INLINE void dots(int64_t output, int64_t row, int64_t tile, int64_t tiles, Vec<C>* sum) const {
        const T *w[side], *x[rows];
        each<side>([&](auto o) ALWAYS_INLINE { w[o] = weight(output + o); });
        each<rows>([&](auto r) ALWAYS_INLINE { x[r] = input(row + r); });
        int64_t at = 0;
        const auto go = [&](auto ask) ALWAYS_INLINE {
            for (; at + step <= call.in_features; at += step) ask(), add<rows>(w, x, at, sum);
        };
        const int64_t next = lanes * call.weight_row;  // from here to the same output of the next task
        if constexpr (!std::is_same_v<T, Out>) {       // weights lie in a cache, and nothing behind them
            go([]() ALWAYS_INLINE {});
        } else if (tiles > 1) {  // each tile asks for a part of its weights
            const T* one = tile < side ? w[0] + next + tile * call.weight_row : w[0];
            const T* two = tile + tiles < side ? w[0] + next + (tile + tiles) * call.weight_row : one;
            go([&]() ALWAYS_INLINE { ask_for(one + at), ask_for(two + at); });
        } else if (call.weight_row * int64_t(sizeof(T)) <= SHORT) {
            const T* ahead = w[0] + AHEAD / int64_t(sizeof(T));
            go([&]() ALWAYS_INLINE {
                each<side>([&](auto o) ALWAYS_INLINE { ask_for(ahead + side * at + o * step); });
            });
        } else {
            go([&]() ALWAYS_INLINE {
                each<side>([&](auto o) ALWAYS_INLINE { ask_for(w[o] + side * call.weight_row + at); });
            });
        }
        if (at == call.in_features) return;
        T ends[rows + side][step] = {};  // what is missing counts for nothing
        each<side>([&](auto o) ALWAYS_INLINE {
            std::copy(w[o] + at, w[o] + call.in_features, ends[rows + o]);
            w[o] = ends[rows + o];
        });
        each<rows>([&](auto r) ALWAYS_INLINE {
            std::copy(x[r] + at, x[r] + call.in_features, ends[r]);
            x[r] = ends[r];
        });
        add<rows>(w, x, 0, sum);
    }

    template <int rows>
    static ALWAYS_INLINE void add(const T* const* w, const T* const* x, int64_t at, Vec<C>* sum) {
#if defined(__AVX512BF16__)
        if constexpr (pairs) {
            __m512bh some[side];
            each<side>([&](auto o) ALWAYS_INLINE { some[o] = read<__m512bh>(w[o] + at); });
            each<rows>([&](auto r) ALWAYS_INLINE {
                const __m512bh part = read<__m512bh>(x[r] + at);
                each<side>([&](auto o) ALWAYS_INLINE {
                    sum[r * side + o] = as<Vec<C>>(_mm512_dpbf16_ps(as<__m512>(sum[r * side + o]), some[o], part));
                });
            });
            return;
        }
#endif
        if constexpr (!pairs) {
            Vec<C> some[side];
            each<side>([&](auto o) ALWAYS_INLINE { some[o] = load(w[o] + at); });
            each<rows>([&](auto r) ALWAYS_INLINE {
                const Vec<C> part = load(x[r] + at);
                each<side>([&](auto o) ALWAYS_INLINE { sum[r * side + o] += some[o] * part; });
            });
        }
    }

    void write(Vec<C> total, int64_t output, int64_t row, int64_t count) const {
        Out* out = reinterpret_cast<Out*>(call.out) + row * call.out_row + output;
        const Out* bias = reinterpret_cast<const Out*>(call.bias);
        for (int64_t i = 0; i < count; i++) {
            const C value = total[i];
            narrow(bias ? value + C(wide(bias[output + i])) : value, out[i]);
        }
    }
};

// A linear, and its inputs as a `Work` wants them.
template <class Number>
struct Prepared : Linear {
    const Number* prepared;
};

// Rows from which on numbers of 16 bits are made floats, which each tile of rows would do anew: inputs once a call,
// weights once. Sums are the same.
constexpr int64_t WIDENED = 16;

template <class T>
class Widened {
    static constexpr int lanes = Vector<float>::lanes;
    const Prepared<float>& call;  // [rows, in_features]

   public:
    explicit Widened(const Prepared<float>& call) : call(call) {}

    static int64_t room(const Linear& call) { return call.rows * call.in_features; }

    static void prepare(const Linear& call, float* to) {
        for (int64_t row = 0; row < call.rows; row++, to += call.in_features)
            widen(reinterpret_cast<const T*>(call.input) + row * call.input_row, call.in_features, to);
    }

    int64_t tasks() const { return (call.out_features + lanes - 1) / lanes; }

    void task(int64_t at) const {
        static thread_local std::vector<float> room;
        const int64_t first = at * lanes, count = std::min<int64_t>(lanes, call.out_features - first);
        room.resize(std::max<size_t>(room.size(), lanes * call.in_features));
        for (int64_t i = 0; i < count; i++)
            widen(reinterpret_cast<const T*>(call.weight) + (first + i) * call.weight_row, call.in_features,
                  room.data() + i * call.in_features);
        Linear own = call;
        own.input = reinterpret_cast<const char*>(call.prepared);
        own.weight = reinterpret_cast<const char*>(room.data());
        own.input_row = own.weight_row = call.in_features, own.out_features = count;
        own.out += first * sizeof(T);
        if (own.bias) own.bias += first * sizeof(T);
        Product<float, T>(own).task(0);
    }

    static void widen(const T* from, int64_t count, float* to) {
        int64_t i = 0;
        for (; i + lanes <= count; i += lanes) store(load(from + i), to + i);
        for (; i < count; i++) to[i] = wide(from[i]);
    }
};

inline bool same_input(const Linear& one, const Linear& other) {
    return one.input == other.input && one.rows == other.rows && one.in_features == other.in_features &&
           one.input_row == other.input_row;
}

// Calls with one input share what is prepared of it: `Work::room` numbers, by `Work::prepare`.
template <class Work, class Number>
void prepared_together(const Linear* const* calls, int64_t count) {
    static thread_local std::vector<Number> room;
    static thread_local std::vector<Prepared<Number>> all;
    static thread_local std::vector<const Prepared<Number>*> each;
    all.clear(), each.clear();
    for (int64_t i = 0; i < count; i++) all.push_back({*calls[i], nullptr});
    for (auto& one : all) each.push_back(&one);
    prepare(all, &Prepared<Number>::prepared, room, Work::room, Work::prepare);
    together<Work>(each.data(), count);
    keep_little(room);
}

#if defined(WITH_TILES)

// In bfloat16, with tiles (amx.h): weights are on the left, as they lie in memory, so that outputs are rows of a tile,
// and rows its columns. The sums of 32 inputs each are added up in their order.
class Tiled {
    static constexpr int OUTPUTS_OF_TASK = 64, INPUTS = 32, ROWS = 4 * TILE_ROWS;
    // Its input, of 64 rows at a time [in_features / 32, tiles, 16, rows of a tile, 2], zeros where there is none.
    const Prepared<bfloat16>& call;
    const int64_t columns;  // of a tile

   public:
    static bool fits(const Linear& call) { return has_tiles() && call.in_features % INPUTS == 0; }
    static int64_t columns_of(int64_t rows) { return std::min<int64_t>(rows, TILE_ROWS); }
    static int64_t tiles_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
    static int64_t room(const Linear& call) {
        return tiles_of(call.rows) * columns_of(call.rows) * call.in_features;
    }

    explicit Tiled(const Prepared<bfloat16>& call) : call(call), columns(columns_of(call.rows)) {}

    int64_t tasks() const { return call.rows ? (call.out_features + OUTPUTS_OF_TASK - 1) / OUTPUTS_OF_TASK : 0; }

    void task(int64_t at) const {
        Shapes shapes;
        const int64_t end = std::min((at + 1) * OUTPUTS_OF_TASK, call.out_features);
        for (int64_t output = at * OUTPUTS_OF_TASK; output < end; output += TILE_ROWS) {
            const int64_t outputs = std::min<int64_t>(TILE_ROWS, end - output);
            if (!shapes.are(outputs)) shapes.set(INPUTS / 2, outputs, columns);
            for (int64_t row = 0; row < call.rows; row += ROWS) {
                const int64_t tiles = tiles_of(std::min<int64_t>(ROWS, call.rows - row));
                each<ROWS / TILE_ROWS>([&](auto i) ALWAYS_INLINE {
                    if (tiles == i + 1) multiply<i + 1>(output, outputs, row);
                });
            }
        }
    }

    static void prepare(const Linear& call, bfloat16* to) {
        const int64_t columns = columns_of(call.rows), pairs = call.in_features / 2, share = 128;
        const int64_t tiles = tiles_of(call.rows), shares = (pairs + share - 1) / share;
        Tasks(tiles * shares, std::min(call.threads, call.rows * call.in_features / WORTH + 1), [&](int64_t at) {
            const int64_t first = at / shares * TILE_ROWS, from = at % shares * share;
            const int64_t there = std::min(columns, call.rows - first), block = first / ROWS * ROWS;
            const int64_t beside = tiles_of(std::min<int64_t>(ROWS, call.rows - block));
            const char* const input = call.input + first * call.input_row * int64_t(sizeof(bfloat16));
            const auto mask = __mmask16((1u << columns) - 1);
            uint32_t* own = reinterpret_cast<uint32_t*>(to) + block * pairs +
                            (from * beside + first - block) * columns;
            for (int64_t pair = from; pair < std::min(from + share, pairs); pair += TILE_ROWS) {
                Words some[TILE_ROWS] = {};
                for (int64_t row = 0; row < there; row++)
                    some[row] = read<Words>(input + (row * call.input_row + 2 * pair) * 2);
                turn(some);
                each<TILE_ROWS>([&](auto i) ALWAYS_INLINE {
                    _mm512_mask_storeu_epi32(own + i * columns, mask, (__m512i)some[i]);
                });
                own += beside * TILE_ROWS * columns;
            }
        });
    }

   private:
    // Up to 16 outputs of so many tiles of rows. Weights of the next 16 are asked for.
    template <int tiles>
    void multiply(int64_t output, int64_t outputs, int64_t row) const {
        const bfloat16* weight = reinterpret_cast<const bfloat16*>(call.weight) + output * call.weight_row;
        const bfloat16* packed = call.prepared + row * call.in_features;
        const int64_t tile = columns * INPUTS;
        const bool ask = row == 0;
        each<tiles>([&](auto i) ALWAYS_INLINE { clear_tile<SUMS + i>(); });
        for (int64_t at = 0; at < call.in_features; at += INPUTS, packed += tiles * tile) {
            load_tile<LEFT>(weight + at, call.weight_row * 2);
            if (ask)
                for (int i = 0; i < TILE_ROWS; i++) ask_for(weight + (TILE_ROWS + i) * call.weight_row + at);
            each<tiles>([&](auto i) ALWAYS_INLINE {
                load_tile<RIGHT + i % 2>(packed + i * tile, columns * 4);
                multiply_tiles<SUMS + i, LEFT, RIGHT + i % 2>();
            });
        }
        alignas(64) float sums[tiles][TILE_ROWS * TILE_ROWS];  // [outputs, columns]
        each<tiles>([&](auto i) ALWAYS_INLINE { store_tile<SUMS + i>(sums[i], columns * 4); });
        for (int64_t i = 0; i < tiles; i++) write(sums[i], output, outputs, row + i * TILE_ROWS);
    }

    // The sums of up to 16 outputs and rows.
    void write(const float* sums, int64_t output, int64_t outputs, int64_t row) const {
        bfloat16 own[TILE_ROWS] = {};
        if (call.bias) std::copy_n(reinterpret_cast<const bfloat16*>(call.bias) + output, outputs, own);
        const Vec<float> added = load(own);
        const auto there = __mmask16((1u << columns) - 1);
        Vec<float> some[TILE_ROWS];
        each<TILE_ROWS>([&](auto i) ALWAYS_INLINE {
            some[i] = i < outputs ? Vec<float>(_mm512_maskz_loadu_ps(there, sums + i * columns)) : Vec<float>{};
        });
        turn(some);
        auto* const out = reinterpret_cast<bfloat16*>(call.out) + row * call.out_row + output;
        for (int64_t r = 0; r < std::min(columns, call.rows - row); r++) {
            const Vec<float> total = call.bias ? some[r] + added : some[r];
            if (outputs == TILE_ROWS) {
                store(total, out + r * call.out_row);
            } else {
                bfloat16 rounded[TILE_ROWS];
                store(total, rounded);
                std::copy_n(rounded, outputs, out + r * call.out_row);
            }
        }
    }
};

#endif

template <class T>
void products(const Linear* const* calls, int64_t count) {
#if defined(WITH_TILES)
    if constexpr (std::is_same_v<T, bfloat16>) {
        const int64_t fit = std::count_if(calls, calls + count, [](auto one) { return Tiled::fits(*one); });
        if (fit == count) return prepared_together<Tiled, bfloat16>(calls, count);
        if (fit)  // each as if it were alone
            return void(std::for_each(calls, calls + count, [](auto& one) { products<T>(&one, 1); }));
    }
#endif
    if constexpr (sizeof(T) < 4 && !Product<T>::pairs)
        if (calls[0]->rows >= WIDENED) return prepared_together<Widened<T>, float>(calls, count);
    together<Product<T>>(calls, count);
}
