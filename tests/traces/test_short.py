"""Kernel names as people read them."""

import pytest

from traces.short import short_name

AT = "at::native::"
ADD = f"{AT}CUDAFunctor_add<float>"
MUL = f"{AT}BinaryFunctor<float, float, float, {AT}binary_internal::MulFunctor<float> >"
COPY = f"{AT}direct_copy_kernel_cuda({AT}TensorIteratorBase&)::{{lambda()#3}}::operator()() const"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (f"void {AT}vectorized_elementwise_kernel<4, {ADD}, std::array<char*, 3ul> >(int, {ADD})",
         "vectorized_elementwise_kernel<CUDAFunctor_add>"),
        (f"void {AT}elementwise_kernel<128, 2, {AT}gpu_kernel_impl_nocast<{MUL} >(x&)>(int, {MUL})",
         "elementwise_kernel<MulFunctor>"),
        (f"void {AT}unrolled_elementwise_kernel<{COPY}, 4>(int, {COPY})",
         "unrolled_elementwise_kernel<direct_copy_kernel_cuda>"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 9, false>(float*, int)",
         "softmax_warp_forward"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 7>(P<int, 7>)",
         "gemvx::kernel"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_nn>(cutlass_80_simt::Params)",
         "Kernel2<cutlass_80_simt_sgemm_64x64_nn>"),
        ("flash_fwd(float*, int)", "flash_fwd"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("kernel_cutlass_gemv_cute_kernel_ptrbf16gmemalign16_ptrbf16gmemalign16__5120_2_4_True_0",
         "gemv_cute_kernel"),
        ("aten::index_put_", "aten::index_put_"),
    ],
)  # fmt: skip
def test_a_template_is_named_by_itself_and_its_operation(name: str, short: str) -> None:
    assert short_name(name) == short
