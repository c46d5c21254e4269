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

#include <cstring>

namespace {

constexpr long kCudnnVersion = 91900;

cudaDeviceProp properties{};

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

}  // namespace

namespace c10::cuda {
DeviceIndex device_count() noexcept { return 1; }
DeviceIndex device_count_ensure_non_zero() { return 1; }
DeviceIndex current_device() { return 0; }
}  // namespace c10::cuda

namespace at::cuda {
cudaDeviceProp* getCurrentDeviceProperties() { return &properties; }
cudaDeviceProp* getDeviceProperties(c10::DeviceIndex) { return &properties; }
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
PyObject* install(PyObject*, PyObject* arguments) {
  cudaDeviceProp& gpu = properties;
  const char* name;
  unsigned long long memory, shared;
  if (!PyArg_ParseTuple(arguments, "siiiKiiK", &name, &gpu.major, &gpu.minor,
                        &gpu.multiProcessorCount, &memory, &gpu.l2CacheSize,
                        &gpu.maxThreadsPerMultiProcessor, &shared)) {
    return nullptr;
  }
  std::strncpy(gpu.name, name, sizeof gpu.name - 1);
  gpu.totalGlobalMem = memory;
  gpu.warpSize = 32;
  gpu.maxThreadsPerBlock = 1024;
  gpu.regsPerMultiprocessor = 65536;
  gpu.sharedMemPerBlock = 48 << 10;
  gpu.sharedMemPerBlockOptin = shared;
  gpu.sharedMemPerMultiprocessor = shared + (1 << 10);
  gpu.maxGridSize[0] = 2147483647;
  auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(&guard);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"install", install, METH_VARARGS, nullptr}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fake_gpu", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_fake_gpu() { return PyModule_Create(&module); }
