// RMSNorm of dense rows. Squares are summed in float32 whatever the dtype, as transformers does.
#include <algorithm>
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int64_t WORTH_A_THREAD = 1 << 15;  // numbers; below that, waking one takes longer

struct Call {
    const void* rows;
    void* out;
    const void* weight;
    int64_t count, size;
    double epsilon;
    int64_t offset, rounds_first, threads;
};

inline float wide(float x) { return x; }
inline float wide(bfloat16 x) { return as<float>(uint32_t(x.bits) << 16); }
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, bfloat16& to) {  // to the nearest, ties to even
    uint32_t bits = as<uint32_t>(x);
    to.bits = x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}
template <class T>
inline float rounded(float x) {
    T to;
    narrow(x, to);
    return wide(to);
}

template <class T>
void normalize(const Call& call, int64_t row) {
    constexpr int PARTS = 16;  // sums side by side: a compiler must not reorder a single one
    const T* x = static_cast<const T*>(call.rows) + row * call.size;
    const T* weight = static_cast<const T*>(call.weight);
    T* out = static_cast<T*>(call.out) + row * call.size;
    float sums[PARTS] = {};
    int64_t at = 0;
    for (; at + PARTS <= call.size; at += PARTS)
        for (int part = 0; part < PARTS; ++part) {
            float value = wide(x[at + part]);
            sums[part] += value * value;
        }
    for (; at < call.size; ++at) sums[0] += wide(x[at]) * wide(x[at]);
    float total = 0;
    for (float sum : sums) total += sum;
    const float scale = 1 / std::sqrt(total / call.size + float(call.epsilon));
    const float offset = float(call.offset);
    if (call.rounds_first)
        for (int64_t i = 0; i < call.size; ++i)
            narrow(rounded<T>(wide(x[i]) * scale) * (wide(weight[i]) + offset), out[i]);
    else
        for (int64_t i = 0; i < call.size; ++i)
            narrow(wide(x[i]) * scale * (wide(weight[i]) + offset), out[i]);
}

template <class T>
struct Job {
    const Call& call;
    int64_t next = 0;

    static void work(void* job) {
        Job& self = *static_cast<Job*>(job);
        for (int64_t row; (row = __atomic_fetch_add(&self.next, 1, __ATOMIC_RELAXED)) < self.call.count;)
            normalize<T>(self.call, row);
    }

    void run() {
        int64_t most = std::max<int64_t>(1, call.count * call.size / WORTH_A_THREAD);
        int64_t threads = std::min({call.threads, call.count, most});
        if (threads > 1) GOMP_parallel(work, this, unsigned(threads), 0);
        else work(this);
    }
};

}  // namespace

extern "C" {
bool rms_norm_float32(const Call* call) { return Job<float>{*call}.run(), true; }
bool rms_norm_bfloat16(const Call* call) { return Job<bfloat16>{*call}.run(), true; }
}
