// A device that is not the CPU, for machines without one: its tensors lie in CPU memory and the CPU computes with them,
// but torch takes them for those of an accelerator. As on a GPU, an operation refuses tensors of the CPU beside those of
// the device (single numbers, and indices of a tensor on the device, are allowed), and generators of the CPU for tensors
// of the device. There is one device, without streams, pinned memory or collectives.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>

using at::Tensor;
using Sizes = c10::SymIntArrayRef;
using Optional = std::optional<Tensor>;

static c10::Device the_device() { return {c10::DeviceType::PrivateUse1, 0}; }

// ---------------------------------------------------------------------------------------- device, memory, random numbers

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream the_stream() { return c10::Stream(c10::Stream::DEFAULT, the_device()); }
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return the_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return the_stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

static void grow(const c10::Storage& storage, size_t bytes) {
  auto* own = storage.unsafeGetStorageImpl();
  auto fresh = memory.allocate(bytes);
  if (size_t kept = std::min(bytes, own->nbytes())) std::memcpy(fresh.get(), own->data(), kept);
  own->set_data_ptr_noswap(std::move(fresh));
  own->set_nbytes(bytes);
}

struct Generator : at::CPUGeneratorImpl {
  at::Generator inner;  // draws the numbers: kernels of the CPU take no other
  explicit Generator(uint64_t seed = c10::default_rng_seed_val)
      : at::CPUGeneratorImpl(seed), inner(at::detail::createCPUGenerator(seed)) {
    device_ = the_device();
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator();
    copy->inner = inner.clone();
    return copy;
  }
};

static at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<Generator>();
  return generator;
}
static at::Generator inner_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  at::Device getDeviceFromPtr(void*) const override { return the_device(); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
};

// ------------------------------------------------------------------------------------------------------- making tensors

static Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

static Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
static Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
  auto kept = tensor;
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [kept](void*) mutable {},
                             tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

static Tensor on_device(const Tensor& tensor) {
  return tensor.defined() ? tensor.contiguous().to(the_device()) : tensor;
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

static at::Scalar local_scalar(const Tensor& tensor) { return at::_local_scalar_dense(as_cpu(tensor)); }

static const Tensor& resize(const Tensor& tensor, Sizes size, std::optional<at::MemoryFormat>) {
  auto* own = tensor.unsafeGetTensorImpl();
  own->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (own->numel() + own->storage_offset()) * own->itemsize();
  if (bytes > tensor.storage().nbytes()) grow(tensor.storage(), bytes);
  return tensor;
}

static Tensor& set_storage(Tensor& tensor, at::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  return at::native::set_storage_cpu_(tensor, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

static Tensor& set_whole_storage(Tensor& tensor, at::Storage storage) {
  int64_t size = storage.nbytes() / tensor.element_size();
  return at::native::set_storage_cpu_(tensor, storage, 0, {size}, {});
}

// --------------------------------------------------------------------------------------------------------- operations

static void check_devices(const std::string& name, std::initializer_list<Tensor> tensors) {
  for (const auto& tensor : tensors)
    TORCH_CHECK(!tensor.defined() || !tensor.device().is_cpu(), name, " got tensors of the CPU and of the device");
}

static bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// Every operation without a function of its own: refuse what a GPU would refuse, and let the CPU compute the rest.
static void fall_back(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& arguments = operation.schema().arguments();
  const std::string name = operation.schema().name();
  const bool indexes = starts_with(name, "aten::index_put") || starts_with(name, "aten::_index_put_impl") ||
                       name == "aten::index";
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (tensor.defined() && tensor.dim() > 0) check_devices(name + ", argument " + arguments[i].name(), {tensor});
    } else if (value.isTensorList() && !indexes) {
      for (const Tensor& tensor : value.toTensorVector()) check_devices(name, {tensor});
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device() == the_device(), name, " got a generator of the CPU for a tensor of the device");
      value = inner_of(generator);
    } else if (value.isNone() && arguments[i].name() == "generator") {
      value = inner_of(default_generator());
    }
  }
  at::native::cpu_fallback(operation, stack);
}

static Tensor convolve(const Tensor& input, const Tensor& weight, const Optional& bias, Sizes stride, Sizes padding,
                       Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  Tensor shift = bias.value_or(Tensor());
  check_devices("convolution", {input, weight, shift});
  return on_device(at::convolution(as_cpu(input), as_cpu(weight), as_cpu(shift), C10_AS_INTARRAYREF_SLOW(stride),
                                   C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
                                   C10_AS_INTARRAYREF_SLOW(output_padding), groups.expect_int()));
}

static std::tuple<Tensor, Tensor, Tensor> convolve_backward(const Tensor& gradient, const Tensor& input,
                                                            const Tensor& weight, Sizes stride, Sizes padding,
                                                            Sizes dilation, bool transposed, Sizes output_padding,
                                                            c10::SymInt groups, std::array<bool, 3> wanted) {
  check_devices("convolution backward", {gradient, input, weight});
  std::vector<int64_t> bias = {transposed ? weight.size(1) * groups.expect_int() : weight.size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      as_cpu(gradient), as_cpu(input), as_cpu(weight), at::OptionalIntArrayRef(bias), C10_AS_INTARRAYREF_SLOW(stride),
      C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
      C10_AS_INTARRAYREF_SLOW(output_padding), groups.expect_int(), wanted);
  return {on_device(of_input), on_device(of_weight), on_device(of_bias)};
}

static std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& input, const Optional& weight, const Optional& bias,
                                                     c10::SymInt n, c10::SymInt c, c10::SymInt rest, int64_t groups,
                                                     double eps) {
  Tensor scale = weight.value_or(Tensor()), shift = bias.value_or(Tensor());
  check_devices("group norm", {input, scale, shift});
  auto [output, mean, deviation] =
      at::native_group_norm(as_cpu(input).contiguous(), as_cpu(scale), as_cpu(shift), n.expect_int(), c.expect_int(),
                            rest.expect_int(), groups, eps);
  return {on_device(output), on_device(mean), on_device(deviation)};
}

static int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const Optional&, double, bool,
                                std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor",
               [](Tensor& tensor, const Tensor& source) -> Tensor& { return at::native::set_tensor_(tensor, source); });
  library.impl("as_strided", [](const Tensor& tensor, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
  });
  library.impl("view", [](const Tensor& tensor, Sizes size) {
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
  });
  library.impl("_reshape_alias", [](const Tensor& tensor, Sizes size, Sizes stride) {
    return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("convolution_overrideable", &convolve);
  library.impl("convolution_backward_overrideable", &convolve_backward);
  library.impl("native_group_norm", &group_norm);
  library.impl("_fused_sdp_choice", &choose_attention);
  // `parameter.data = ...` may move a parameter between the CPU and a GPU, so also here
  library.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
}

// copy_from reads the bits of conjugated and negated tensors itself
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
using namespace at;  // for the macros below
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_hooks", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  module.def("default_generator", [] { return default_generator(); });
}
