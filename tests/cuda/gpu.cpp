// A GPU that torch's C++ believes in, on a machine without one. Fake tensors on `cuda` then run
// through autograd, and torch chooses kernels as it would on the GPU; nothing can be launched.
//
// Loaded before libtorch_cuda with RTLD_GLOBAL, so that the linker takes the functions of
// `c10::cuda` and `at::cuda` from here, and torch's registry refuses its own CUDA hooks.
#include <Python.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <driver_types.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr long kCudnnVersion = 91900;

// Properties by TORCHTITAN_TEST_SM: an H100 (90), or a B200 (100).
cudaDeviceProp properties_of_gpu() {
  const char* chosen = std::getenv("TORCHTITAN_TEST_SM");
  const bool blackwell = chosen != nullptr && std::strcmp(chosen, "100") == 0;
  cudaDeviceProp gpu{};
  std::strcpy(gpu.name, blackwell ? "NVIDIA B200" : "NVIDIA H100 80GB HBM3");
  gpu.major = blackwell ? 10 : 9;
  gpu.multiProcessorCount = blackwell ? 148 : 132;
  gpu.totalGlobalMem = (blackwell ? 180ull : 80ull) << 30;
  gpu.l2CacheSize = (blackwell ? 126 : 50) << 20;
  gpu.warpSize = 32;
  gpu.maxThreadsPerBlock = 1024;
  gpu.maxThreadsPerMultiProcessor = 2048;
  gpu.regsPerMultiprocessor = 65536;
  gpu.sharedMemPerBlock = 48 << 10;
  gpu.sharedMemPerBlockOptin = 227 << 10;
  gpu.sharedMemPerMultiprocessor = 228 << 10;
  gpu.maxGridSize[0] = 2147483647;
  return gpu;
}

cudaDeviceProp* gpu() {
  static cudaDeviceProp properties = properties_of_gpu();
  return &properties;
}

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

}  // namespace

namespace c10::cuda {
DeviceIndex device_count() noexcept { return 1; }
DeviceIndex device_count_ensure_non_zero() { return 1; }
DeviceIndex current_device() { return 0; }
}  // namespace c10::cuda

namespace at::cuda {
cudaDeviceProp* getCurrentDeviceProperties() { return gpu(); }
cudaDeviceProp* getDeviceProperties(c10::DeviceIndex) { return gpu(); }
}  // namespace at::cuda

namespace {

// Autograd asks the guard for streams and events.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  static Stream stream() { return Stream(Stream::DEFAULT, kDevice); }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(c10::Device) const noexcept override { return stream(); }
  Stream getDefaultStream(c10::Device) const override { return stream(); }
  Stream getNewStream(c10::Device, int) const override { return stream(); }
  Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();  // nothing random is computed
  }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return kCudnnVersion; }
  long versionRuntimeCuDNN() const override { return kCudnnVersion; }
};

std::unique_ptr<at::CUDAHooksInterface> make_hooks(at::CUDAHooksArgs) {
  return std::make_unique<Hooks>();
}

const bool hooks_registered = [] {
  auto* registry = at::CUDAHooksRegistry();
  registry->SetTerminate(false);  // torch's own, registered later, is ignored
  registry->Register("CUDAHooks", make_hooks, c10::REGISTRY_PREFERRED);
  return true;
}();

Guard guard;

// Called after torch is loaded, which registers its own guard.
PyObject* install_guard(PyObject*, PyObject*) {
  auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(&guard);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"install_guard", install_guard, METH_NOARGS, nullptr}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fake_gpu", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_fake_gpu() { return PyModule_Create(&module); }
