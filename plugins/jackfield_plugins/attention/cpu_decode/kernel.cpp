// Attention of one query token a sequence.
//
// The keys of a sequence are cut into chunks; a task is one chunk of one key/value head, for all
// query heads that share it, so that keys and values are read once. Whoever ends the last task of
// a head adds its chunks up (flash-decoding). Chunks begin with the first key that is seen, have a
// fixed length and are added in their order, so a result depends neither on the number of threads
// nor on what else is in the batch.
#include <algorithm>
#include <atomic>
#include <tuple>

#include "memory.h"
#include "prompts.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 256;      // keys of a task
constexpr int64_t BLOCK = 32;       // keys whose values stay in the nearest cache for all heads
constexpr int64_t SOON = 16;        // keys ahead that are asked for

// What Python packs, field by field. Strides are in elements; those within heads are 1. `key` and
// `value` are [batch, kv_heads, keys, size], or pools [pages, page_size, kv_heads, size].
struct Call {
    const void *query, *key, *value;
    void* out;  // [rows, heads, value_size], contiguous
    int64_t rows, heads, kv_heads, key_size, value_size, threads;
    double scaling;
    int64_t query_row, query_head;
    int64_t key_row, key_head, key_token, value_row, value_head, value_token;
    // Padded: each row has `keys` and sees those that its mask, if there is one, is true for.
    int64_t keys;
    const bool* mask;
    int64_t mask_row;
    // Packed, if there is a table: see PageTables. Sequence i has the tokens from starts[i] on, and
    // is left out if they are several.
    const int32_t *table, *first, *lengths, *starts;
    int64_t table_row, page_size, window;
    int64_t tokens, columns, pages;  // queries, columns of the table, pages of a pool
};

// The rows of a step, which all its layers have in common: at one place in memory, written anew for
// each step. The other arguments of a call are the same in every step.
struct Step {
    int64_t rows, threads;
    const int32_t *table, *first, *lengths, *starts;
    int64_t table_row, columns;
};

struct StepCall {
    const Step* step;
    Call call;  // but for what the step has
};

// The keys that a sequence sees, the token of its query, and the tasks before its own.
struct Row {
    int64_t begin, end, token, tasks;
    int64_t chunks() const { return (end - begin + CHUNK - 1) / CHUNK; }
};

// A head of `size` elements in vectors. The last begins early enough to end with the head.
template <class C>
struct Split {
    static constexpr int lanes = Vector<C>::lanes;
    int64_t size, count, padded;
    explicit Split(int64_t size)
        : size(size), count((size + lanes - 1) / lanes), padded(count * lanes) {}
    bool narrow() const { return size < lanes; }
    int64_t at(int64_t i) const { return i + 1 < count || narrow() ? i * lanes : size - lanes; }
};

// Scores of `heads` query heads for as many keys as fill a vector with sums.
template <int heads, class T, class C>
inline void score(const C* query, const T* const* keys, Split<C> split, C* scores) {
    constexpr int count = Vector<C>::lanes / heads;
    const T* key[count];
    each<count>([&](auto k) ALWAYS_INLINE { key[k] = keys[k]; });
    Vec<C> sum[heads * count];
    each<heads * count>([&](auto i) ALWAYS_INLINE { sum[i] = Vec<C>{}; });
    for (int64_t i = 0; i < split.count; i++) {
        const int64_t at = split.at(i);
        Vec<C> q[heads];
        each<heads>([&](auto h) ALWAYS_INLINE { q[h] = load(query + h * split.padded); });
        each<count>([&](auto k) ALWAYS_INLINE {
            Vec<C> part = load(key[k] + at);
            each<heads>([&](auto h) ALWAYS_INLINE { sum[h * count + k] += q[h] * part; });
        });
        query += split.lanes;
    }
    Vec<C> found = sums<C>(sum);
    each<heads>([&](auto h) ALWAYS_INLINE {
        auto* from = reinterpret_cast<const C*>(&found) + h * count;
        std::memcpy(scores + h * CHUNK, from, count * sizeof(C));
    });
}

// out += weights × values for `heads` heads and `parts` vectors from the i-th on.
template <int heads, int parts, class T, class C>
inline void weigh(const C* weights, const T* const* values, int64_t count, Split<C> split,
                  int64_t i, C* out) {
    Vec<C> sum[heads * parts];
    int64_t at[parts];
    out += i * split.lanes;
    auto place = [&](int j) { return out + j / parts * split.padded + j % parts * split.lanes; };
    each<parts>([&](auto p) ALWAYS_INLINE { at[p] = split.at(i + p); });
    each<heads * parts>([&](auto j) ALWAYS_INLINE { sum[j] = load(place(j)); });
    for (int64_t k = 0; k < count; k++) {
        const T* value = values[k];
        Vec<C> part[parts];
        each<parts>([&](auto p) ALWAYS_INLINE { part[p] = load(value + at[p]); });
        each<heads * parts>([&](auto j) ALWAYS_INLINE {
            sum[j] += weights[j / parts * CHUNK + k] * part[j % parts];
        });
    }
    each<heads * parts>([&](auto j) ALWAYS_INLINE { store(sum[j], place(j)); });
}

template <int heads, class T, class C>
inline void weigh_all(const C* weights, const T* const* values, int64_t count, Split<C> split,
                      C* out) {
    int64_t i = 0;
    for (; i + 4 <= split.count; i += 4) weigh<heads, 4>(weights, values, count, split, i, out);
    for (; i + 2 <= split.count; i += 2) weigh<heads, 2>(weights, values, count, split, i, out);
    if (i < split.count) weigh<heads, 1>(weights, values, count, split, i, out);
}

// Calls what(h, heads) with heads 4, 2 or 1. Three are four, of which the last counts for nothing.
template <class C, class What>
inline void by_heads(int64_t group, What what) {
    int64_t h = 0;
    if constexpr (Vector<C>::lanes >= 4)
        for (; group - h > 2; h += 4) what(h, std::integral_constant<int, 4>());
    for (; group - h >= 2; h += 2) what(h, std::integral_constant<int, 2>());
    if (group - h == 1) what(h, std::integral_constant<int, 1>());
}

// Turns scores into their powers of 2, the largest being 1; the other lanes of the last vector
// into 0. Returns (largest score, sum of powers).
template <class C>
inline std::pair<C, C> soften(C* scores, int64_t count) {
    constexpr int lanes = Vector<C>::lanes;
    for (int64_t k = count; k % lanes; k++) scores[k] = -INFINITY;
    Vec<C> most = load(scores), sum = {};
    for (int64_t k = lanes; k < count; k += lanes) {
        Vec<C> s = load(scores + k);
        most = s > most ? s : most;
    }
    C largest = most[0], total = 0;
    for (int i = 1; i < lanes; i++) largest = std::max(largest, most[i]);
    C zero = largest == -INFINITY ? 0 : largest;  // where none has a weight
    for (int64_t k = 0; k < count; k += lanes) {
        Vec<C> power = power_of_2(load(scores + k) - zero);
        store(power, scores + k);
        sum += power;
    }
    for (int i = 0; i < lanes; i++) total += sum[i];
    return {largest, total};
}

template <class T>
class Decode {
    using C = typename Wide<T>::type;
    static constexpr int lanes = Vector<C>::lanes;

    const Call& call;
    const Split<C> key_split, value_split;
    const int64_t group, room;  // query heads that share keys; as many as there is room for
    int64_t tasks = 0;
    Row* rows;
    std::atomic<int64_t>* left;  // of each row and key/value head: the tasks still to do
    C* parts;                    // of each task: weighted values, then maxima, then sums of weights
    std::atomic<int64_t> next{0};

    // What one thread works on. Heads narrower than a vector are copied, with 0 behind them.
    struct Desk {
        const T *keys[CHUNK], *values[CHUNK];
        T narrow_query[lanes], narrow_keys[CHUNK * lanes], narrow_values[CHUNK * lanes];
        C *query, *scores;
    };

   public:
    explicit Decode(const Call& call)
        : call(call), key_split(call.key_size), value_split(call.value_size),
          group(call.heads / call.kv_heads), room((group + 3) / 4 * 4) {}

    // Whether all rows lie within the memory that there is; if not, nothing was done.
    bool run() {
        if (call.table && !whole()) return false;
        static thread_local Memory lists, sums;
        int64_t heads = call.rows * call.kv_heads, seen = 0;
        size_t bytes = (call.rows + 1) * sizeof *rows + heads * sizeof *left;
        rows = reinterpret_cast<Row*>(lists.hold(bytes));
        left = reinterpret_cast<std::atomic<int64_t>*>(rows + call.rows + 1);
        for (int64_t i = 0; i < call.rows; i++) {
            rows[i] = find(i);
            rows[i].tasks = tasks;
            tasks += rows[i].chunks() * call.kv_heads;
            seen += rows[i].end - rows[i].begin;
            for (int64_t h = 0; h < call.kv_heads; h++)
                left[i * call.kv_heads + h] = rows[i].chunks();
        }
        rows[call.rows].tasks = tasks;
        parts = reinterpret_cast<C*>(sums.hold(tasks * part_size() * sizeof *parts));
        int64_t products = seen * call.heads * (call.key_size + call.value_size);
        int64_t threads = std::min({call.threads, tasks, products / WORTH + 1});
        auto each = [](void* self) { static_cast<Decode*>(self)->work(); };
        if (threads > 1) GOMP_parallel(each, this, threads, 0);
        else each(this);
        return true;
    }

   private:
    // Tables are numbers that a cache wrote. Every token must belong to a row, and every row must
    // read pages that there are.
    bool whole() const {
        for (int64_t i = 0; i < call.rows; i++)
            if (!inside(i)) return false;
        return call.starts[0] == 0 && call.starts[call.rows] == call.tokens;
    }

    bool inside(int64_t i) const {
        const int64_t start = call.starts[i], first = call.first[i], end = call.lengths[i];
        const int64_t after = call.starts[i + 1];
        if (start < 0 || after <= start || after > call.tokens) return false;
        if (after - start > 1) return true;  // left out
        if (first < 0 || end <= first) return false;
        const int64_t begin = call.window ? std::max(first, end - call.window) : first;
        const int64_t last = (end - 1 - first) / call.page_size;
        const int32_t* pages = call.table + i * call.table_row;
        return last < call.columns &&
               std::all_of(pages + (begin - first) / call.page_size, pages + last + 1,
                           [&](int32_t page) { return page >= 0 && page < call.pages; });
    }

    int64_t part_size() const { return room * (value_split.padded + 2); }

    // Which keys row i sees. Nobody's output is written where there is no query; a query that sees
    // no key gets 0, as from torch.
    Row find(int64_t i) const {
        if (call.table) {
            if (call.starts[i + 1] - call.starts[i] != 1) return {};
            int64_t end = call.lengths[i], begin = call.first[i];
            if (call.window) begin = std::max(begin, end - call.window);
            return {begin, end, call.starts[i], 0};
        }
        int64_t begin = 0, end = call.keys;
        if (call.mask) {
            const bool* sees = call.mask + i * call.mask_row;
            while (end && !sees[end - 1]) end--;
            if (end) begin = static_cast<const bool*>(std::memchr(sees, 1, end)) - sees;
            else std::fill_n(output(i, 0), call.heads * call.value_size, T{});
        }
        return {begin, end, i, 0};
    }

    T* output(int64_t token, int64_t head) const {
        return static_cast<T*>(call.out) + (token * call.heads + head * group) * call.value_size;
    }

    void work() {
        static thread_local Memory memory;
        size_t query = room * key_split.padded, scores = room * CHUNK;
        char* at = memory.hold((query + scores) * sizeof(C) + sizeof(Desk));
        Desk& desk = *reinterpret_cast<Desk*>(at + (query + scores) * sizeof(C));
        desk.query = reinterpret_cast<C*>(at);
        desk.scores = desk.query + query;
        int64_t i = 0;
        for (int64_t task; (task = next.fetch_add(1)) < tasks;) {
            while (task >= rows[i + 1].tasks) i++;
            int64_t nth = task - rows[i].tasks, head = nth / rows[i].chunks();
            int64_t from = rows[i].begin + nth % rows[i].chunks() * CHUNK;
            attend(desk, i, head, from, std::min(CHUNK, rows[i].end - from), task);
            if (left[i * call.kv_heads + head].fetch_sub(1) == 1) add_up(i, head);
        }
    }

    void attend(Desk& desk, int64_t i, int64_t head, int64_t from, int64_t count, int64_t task) {
        fetch_query(desk, i, head);
        point(desk.keys, desk.narrow_keys, call.key, i, head, from, count, key_split,
              call.key_row, call.key_head, call.key_token);
        count = point(desk.values, desk.narrow_values, call.value, i, head, from, count,
                      value_split, call.value_row, call.value_head, call.value_token);
        C* out = parts + task * part_size();
        C *most = out + room * value_split.padded, *sum = most + room;
        std::fill_n(out, room * value_split.padded, C{});
        if (!count) {  // none is seen
            std::fill_n(most, group, -INFINITY);
            std::fill_n(sum, group, C{});
            return;
        }
        by_heads<C>(group, [&](int64_t h, auto heads) {
            for (int64_t k = 0; k < count; k += lanes / heads) {
                if (h == 0) ask(desk, k, std::min<int64_t>(k + lanes / heads, count), count);
                score<heads>(desk.query + h * key_split.padded, desk.keys + k, key_split,
                             desk.scores + h * CHUNK + k);
            }
        });
        for (int64_t h = 0; h < group; h++)
            std::tie(most[h], sum[h]) = soften(desk.scores + h * CHUNK, count);
        for (int64_t k = 0; k < count; k += BLOCK)
            by_heads<C>(group, [&](int64_t h, auto heads) {
                weigh_all<heads>(desk.scores + h * CHUNK + k, desk.values + k,
                                 std::min(BLOCK, count - k), value_split,
                                 out + h * value_split.padded);
            });
    }

    // Asks for the values of keys `from` to `upto` of `count`, whose turn comes when all are scored, and for keys that
    // come soon: heads lie apart, so that no machine guesses them.
    ALWAYS_INLINE void ask(const Desk& desk, int64_t from, int64_t upto, int64_t count) const {
        for (int64_t k = from; k < upto; k++) {
            ask_for(desk.values[k], value_split.size * sizeof(T));
            if (k + SOON < count) ask_for(desk.keys[k + SOON], key_split.size * sizeof(T));
        }
    }

    // The queries, scaled for powers of 2. What the last vector repeats is 0 in it.
    void fetch_query(Desk& desk, int64_t i, int64_t head) const {
        const C scale = call.scaling * 1.4426950408889634;
        for (int64_t h = 0; h < group; h++) {
            const T* from = static_cast<const T*>(call.query) + rows[i].token * call.query_row +
                            (head * group + h) * call.query_head;
            C* to = desk.query + h * key_split.padded;
            if (key_split.narrow()) from = widened(desk.narrow_query, from, key_split.size);
            for (int64_t v = 0; v < key_split.count; v++)
                store(load(from + key_split.at(v)) * scale, to + v * lanes);
            int64_t last = (key_split.count - 1) * lanes;
            std::fill_n(to + last, last - key_split.at(key_split.count - 1), C{});
        }
        std::fill(desk.query + group * key_split.padded, desk.query + room * key_split.padded, C{});
    }

    static const T* widened(T* to, const T* from, int64_t size) {
        std::copy_n(from, size, to);
        std::fill(to + size, to + lanes, T{});
        return to;
    }

    // Where the heads of those of `count` tokens are that are seen, and how many these are; the last again
    // up to a full vector of keys. What is hidden may be infinite, which a weight of 0 would not hide.
    int64_t point(const T** to, T* narrow, const void* base, int64_t i, int64_t head, int64_t from,
                  int64_t count, const Split<C>& split, int64_t row, int64_t of_head,
                  int64_t of_token) const {
        const T* start = static_cast<const T*>(base) + head * of_head;
        if (call.table) {
            const int32_t* pages = call.table + i * call.table_row;
            int64_t page = (from - call.first[i]) / call.page_size;
            int64_t slot = (from - call.first[i]) % call.page_size;
            for (int64_t k = 0; k < count; page++, slot = 0)
                for (; slot < call.page_size && k < count; slot++, k++)
                    to[k] = start + pages[page] * row + slot * of_token;
        } else {
            start += i * row + from * of_token;
            for (int64_t k = 0; k < count; k++) to[k] = start + k * of_token;
            if (call.mask) count = seen(to, call.mask + i * call.mask_row + from, count);
        }
        if (split.narrow())
            for (int64_t k = 0; k < count; k++)
                to[k] = widened(narrow + k * lanes, to[k], split.size);
        for (int64_t k = count; k % lanes; k++) to[k] = to[count - 1];
        return count;
    }

    static int64_t seen(const T** keys, const bool* sees, int64_t count) {
        if (!std::memchr(sees, 0, count)) return count;
        int64_t kept = 0;
        for (int64_t k = 0; k < count; k++)
            if (sees[k]) keys[kept++] = keys[k];
        return kept;
    }

    // The chunks of a row and key/value head, each by how large its weights are beside the others'.
    void add_up(int64_t i, int64_t head) const {
        const int64_t chunks = rows[i].chunks(), size = part_size();
        const int64_t maxima = room * value_split.padded, totals = maxima + room;
        C* all = parts + (rows[i].tasks + head * chunks) * size;
        for (int64_t h = 0; h < group; h++) {
            C largest = all[maxima + h], sum = all[totals + h], *out = all + h * value_split.padded;
            for (int64_t c = 1; c < chunks; c++)
                largest = std::max(largest, all[c * size + maxima + h]);
            if (chunks > 1) sum = scale(out, 0, out, std::exp2(all[maxima + h] - largest), sum);
            for (int64_t c = 1; c < chunks; c++) {
                const C* part = all + c * size;
                C factor = std::exp2(part[maxima + h] - largest);
                sum += scale(out, 1, part + h * value_split.padded, factor, part[totals + h]);
            }
            write(out, 1 / sum, output(rows[i].token, head) + h * call.value_size);
        }
    }

    // out = out × kept + part × factor
    C scale(C* out, C kept, const C* part, C factor, C sum) const {
        for (int64_t d = 0; d < value_split.padded; d += lanes)
            store(load(out + d) * kept + load(part + d) * factor, out + d);
        return sum * factor;
    }

    void write(const C* from, C factor, T* to) const {
        T narrow[lanes];
        for (int64_t v = 0; v < value_split.count; v++)
            store(load(from + v * lanes) * factor,
                  value_split.narrow() ? narrow : to + value_split.at(v));
        if (value_split.narrow()) std::copy_n(narrow, call.value_size, to);
    }
};

template <class T>
bool decode(const Call* call) { return Decode<T>(*call).run(); }

template <class T>
bool decode_step(const StepCall* of) {
    const Step& step = *of->step;
    Call call = of->call;
    call.rows = step.rows;
    call.threads = step.threads;
    call.table = step.table;
    call.first = step.first;
    call.lengths = step.lengths;
    call.starts = step.starts;
    call.table_row = step.table_row;
    call.columns = step.columns;
    return decode<T>(&call);
}

}  // namespace

extern "C" {
bool decode_float32(const Call* call) { return decode<float>(call); }
bool decode_float64(const Call* call) { return decode<double>(call); }
bool decode_bfloat16(const Call* call) { return decode<bfloat16>(call); }
bool decode_float16(const Call* call) { return decode<float16>(call); }
bool decode_step_float32(const StepCall* call) { return decode_step<float>(call); }
bool decode_step_float64(const StepCall* call) { return decode_step<double>(call); }
bool decode_step_bfloat16(const StepCall* call) { return decode_step<bfloat16>(call); }
bool decode_step_float16(const StepCall* call) { return decode_step<float16>(call); }
bool prompts_float32(const PromptsCall* call) { return prompts<float>(call); }
bool prompts_float64(const PromptsCall* call) { return prompts<double>(call); }
bool prompts_bfloat16(const PromptsCall* call) { return prompts<bfloat16>(call); }
bool prompts_float16(const PromptsCall* call) { return prompts<float16>(call); }
}
