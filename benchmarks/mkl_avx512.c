/*
 * Makes Intel's MKL, which PyTorch computes float32 matrices with, use its AVX-512 kernels on AMD processors that have
 * these instructions. It chooses slower ones where it does not see an Intel processor. On an AMD EPYC of family 26,
 * three updates of Flow-GRPO took 0.69 times as long (34 and 49 s of the processor, one thread), and the held-out
 * reward after them agreed to six digits: recipes.py --row flow_grpo 1.1e-3 0 --max-updates 3 --rows /tmp/try.jsonl
 *
 *     gcc -shared -fPIC -o mkl_avx512.so benchmarks/mkl_avx512.c
 *     LD_PRELOAD=$PWD/mkl_avx512.so MKL_ENABLE_INSTRUCTIONS=AVX512 python benchmarks/recipes.py ...
 */
int mkl_serv_intel_cpu(void) { return 1; }
int mkl_serv_intel_cpu_true(void) { return 1; }
