// silu(gate) * up in one pass: three streams of memory in place of torch's five.
// No header of torch or Python: one library serves every version of both.

#include <cmath>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

// The exponential is of what is not positive, so it is at most 1: the fast math that turns a loop into
// vectors (-ffast-math) may take it that no number is infinite, and none is made here.
extern "C" FOR_EACH_CPU void silu_mul(const float *gate, const float *up, float *out,
                                      std::int64_t count) {
  for (std::int64_t i = 0; i < count; i++) {
    const float e = std::exp(-std::fabs(gate[i]));
    out[i] = gate[i] * ((gate[i] < 0 ? e : 1.0f) / (1.0f + e)) * up[i];
  }
}
