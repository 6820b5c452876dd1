// OpenMP's own entry. torch has loaded the runtime, so its threads are shared: `#pragma omp` would
// have some compilers ask for another runtime, and two of them get in each other's way.
#pragma once
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags);
