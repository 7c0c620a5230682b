/*
 * Makes Intel's MKL, which PyTorch computes float32 matrices with, use its AVX-512 kernels on AMD processors that have
 * these instructions. It chooses slower ones where it does not see an Intel processor. On an AMD EPYC of family 26 a
 * product of 1024 x 1024 takes 0.45 times as long, and Flow-GRPO's row of the race 0.69. Results differ by rounding.
 *
 *     gcc -shared -fPIC -o mkl_avx512.so benchmarks/mkl_avx512.c
 *     LD_PRELOAD=$PWD/mkl_avx512.so MKL_ENABLE_INSTRUCTIONS=AVX512 python benchmarks/recipes.py ...
 */
int mkl_serv_intel_cpu(void) { return 1; }
int mkl_serv_intel_cpu_true(void) { return 1; }
