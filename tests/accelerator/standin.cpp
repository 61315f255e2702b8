// Two devices for tests, in host memory. What a program gets wrong on a GPU, it gets wrong here:
//   - an address of a device can't be read by the host: it is no address of this process (`kFar`);
//   - operations refuse arguments of several devices, and compute on the CPU what lies on one;
//   - copies are done as late as the program allows: a stream is a queue that runs only when something waits for it or
//     computes on it. Whoever forgets to wait reads old numbers, always. Computing itself is not put off;
//   - new and freed memory is filled with NaN. Memory that is freed while another stream still has to read or write it
//     is filled at once, unless `record_stream` has named the stream.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>

namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType device_type);
}

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kCount = 2;
constexpr uintptr_t kFar = uintptr_t(1) << 52;  // no process has addresses with this bit: reading one ends it
constexpr int kPoison = 0xFF;  // the bytes of a NaN

thread_local DeviceIndex current_device = 0;

// The current device is another one as long as this lives, also if an error ends that.
struct OnDevice {
  explicit OnDevice(DeviceIndex index) : before(std::exchange(current_device, index)) {}
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() { current_device = before; }
  DeviceIndex before;
};
thread_local std::array<StreamId, kCount> current_streams{};

// ---- streams --------------------------------------------------------------------------------------------------------

struct Queue {
  std::deque<std::function<void()>> tasks;
  uint64_t done = 0;
  uint64_t asked() const { return done + tasks.size(); }
};

struct Event {
  Stream stream;
  uint64_t position;
  std::chrono::steady_clock::time_point time;
};

// Never destroyed: torch may free tensors after this library's end.
auto& mutex = *new std::recursive_mutex();
auto& queues = *new std::array<std::map<StreamId, Queue>, kCount>();
auto& finished = *new std::vector<std::function<void()>>();  // freeing these may take Python's lock: never with `mutex`
int depth = 0;

class Locked {
 public:
  Locked() : lock_(mutex) { ++depth; }
  ~Locked() {
    if (--depth == 0) trash_.swap(finished);
    lock_.unlock();
  }

 private:
  std::vector<std::function<void()>> trash_;  // goes last, without the lock
  std::unique_lock<std::recursive_mutex> lock_;
};

Queue& queue_of(const Stream& stream) { return queues[stream.device_index()][stream.id()]; }

void run_until(const Stream& stream, uint64_t position) {
  Locked locked;
  Queue& queue = queue_of(stream);
  while (queue.done < position) {
    auto task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    ++queue.done;
    task();
    finished.push_back(std::move(task));
  }
}

void run_all(const Stream& stream) {
  Locked locked;
  run_until(stream, queue_of(stream).asked());
}

void enqueue(const Stream& stream, std::function<void()> task) {
  Locked locked;
  queue_of(stream).tasks.push_back(std::move(task));
}

Stream current_stream(DeviceIndex index) {
  return Stream(Stream::UNSAFE, Device(kType, index), current_streams[index]);
}

void check_index(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kCount, "There is no device ", int(index), ": there are ", int(kCount), ".");
}

// ---- memory ---------------------------------------------------------------------------------------------------------

struct Block {
  Block(size_t size, Stream stream)
      : host(static_cast<char*>(std::malloc(size))), size(size), stream(stream) {
    TORCH_CHECK(host != nullptr, "The host has no ", size, " bytes for a device.");
    poison();
  }
  ~Block() { std::free(host); }
  void poison() { std::memset(host, kPoison, size); }

  char* host;
  size_t size;
  Stream stream;                 // on which it was allocated
  bool is_used_elsewhere = false;  // on streams that `record_stream` has named
};
using Shared = std::shared_ptr<Block>;

void free_block(void* context) {
  std::unique_ptr<Shared> shared(static_cast<Shared*>(context));
  if ((*shared)->is_used_elsewhere) return;  // it goes with the last task that uses it
  Locked locked;
  if (queue_of((*shared)->stream).tasks.empty()) {
    (*shared)->poison();
  } else {  // what its own stream has been asked for comes first
    enqueue((*shared)->stream, [block = *shared] { block->poison(); });
  }
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(kType, current_device);
    if (size == 0) return {nullptr, device};
    auto* block = new Shared(std::make_shared<Block>(size, current_stream(current_device)));
    return {reinterpret_cast<char*>(reinterpret_cast<uintptr_t>((*block)->host) | kFar), block, &free_block, device};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "A device's memory is copied by tensors only.");
  }
} allocator;

auto& pinned = *new std::map<const char*, size_t>();  // addresses and sizes

struct PinnedAllocator final : c10::Allocator {
  static void free(void* memory) {
    Locked locked;
    pinned.erase(static_cast<char*>(memory));
    std::free(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, c10::kCPU};
    void* memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
    Locked locked;
    pinned[static_cast<char*>(memory)] = size;
    return {memory, memory, &PinnedAllocator::free, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} pinned_allocator;

bool is_pinned(const void* address) {
  Locked locked;
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

bool is_here(const Tensor& tensor) { return tensor.device().type() == kType; }

Shared block_of(const c10::DataPtr& data) {
  if (data.get_deleter() != &free_block) return {};  // others' memory, or none
  return *static_cast<Shared*>(data.get_context());
}

// ---- copies ---------------------------------------------------------------------------------------------------------

// A view of a tensor's memory as the host's, without its history; it keeps the memory of a CPU tensor, not a device's.
Tensor as_host(const Tensor& tensor) {
  auto address = reinterpret_cast<uintptr_t>(tensor.storage().data());
  if (address) address = (address & ~kFar) + tensor.storage_offset() * tensor.itemsize();
  std::function<void(void*)> keep = [](void*) {};
  if (!is_here(tensor)) keep = [storage = tensor.storage()](void*) {};
  auto* data = reinterpret_cast<void*>(address);
  auto options = c10::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  auto found = at::from_blob(data, tensor.sizes(), tensor.strides(), keep, options);
  if (tensor.is_conj()) found._set_conj(true);
  if (tensor.is_neg()) found._set_neg(true);
  return found;
}

struct Plain {  // a copy takes no part in what the thread that happens to run it is recording, tracing or casting
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::PythonDispatcher, c10::DispatchKey::Functionalize})};
};

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Plain plain;
  if (from.numel() == 0) return to;
  bool is_within = is_here(from) && is_here(to);
  bool is_late = is_within ? from.device() == to.device()
                           : non_blocking && is_pinned((is_here(from) ? to : from).storage().data());
  Tensor source = as_host(from), target = as_host(to);
  auto used = std::pair(block_of(from.storage().data_ptr()), block_of(to.storage().data_ptr()));
  auto copy = [source, target, used] {
    Plain plain;
    target.copy_(source);
  };
  if (is_late) {
    enqueue(current_stream((is_here(from) ? from : to).get_device()), copy);
    return to;
  }
  for (const Tensor* tensor : {&from, &to})
    if (is_here(*tensor)) run_all(current_stream(tensor->get_device()));
  copy();
  return to;
}

void resize_storage(const c10::Storage& storage, size_t size) {
  Device device = storage.device();
  auto fresh = [&] {
    OnDevice here(device.index());
    return allocator.allocate(size);
  }();
  run_all(current_stream(device.index()));
  auto from = block_of(storage.data_ptr()), to = block_of(fresh);
  if (from && to) std::memcpy(to->host, from->host, std::min(storage.nbytes(), size));
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(size);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  if (tensor->sizes() == size && !format) return self;
  tensor->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (self.numel() > 0 && bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

// Makes a tensor of a type on a device, or on the current one; the allocator is not told of devices.
template <class Make>
Tensor make_empty(std::optional<at::ScalarType> dtype, std::optional<Device> device, std::optional<bool> pin, Make make) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  DeviceIndex index = device && device->has_index() ? device->index() : current_device;
  check_index(index);
  OnDevice here(index);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return Tensor(make(keys, dtype.value_or(c10::get_default_dtype_as_scalartype())));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  return make_empty(dtype, device, pin, [&](auto keys, auto type) {
    return at::detail::empty_generic(size, &allocator, keys, type, format);
  });
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  return make_empty(dtype, device, pin, [&](auto keys, auto type) {
    return at::detail::empty_strided_generic(size, stride, &allocator, keys, type);
  });
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  TORCH_CHECK(storage.device() == self.device(), "A tensor on ", self.device(), " has no memory on ", storage.device());
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  if (stride.size() == size.size() && stride.data() != nullptr) {
    tensor->set_sizes_and_strides(size, stride);
  } else {
    tensor->set_sizes_contiguous(size);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {});
}

// Whether `.data` may be the other: among dense tensors, also where it is on another kind of device, as on CUDA.
bool is_compatible(const Tensor& self, const Tensor& from) {
  auto is_dense = [](const Tensor& t) { return (is_here(t) || t.device().is_cpu()) && t.layout() == c10::kStrided; };
  return is_dense(self) && is_dense(from);
}

void record_stream(Tensor& self, Stream stream) {
  Locked locked;
  auto block = block_of(self.storage().data_ptr());
  if (block && stream != block->stream) block->is_used_elsewhere = true;
}

// ---- random numbers -------------------------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index, at::Generator inner = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(inner) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), inner.clone()); }

  at::Generator inner;
};

const at::Generator& default_generator(DeviceIndex index) {
  static std::array<at::Generator, kCount> found{at::make_generator<DeviceGenerator>(0),
                                                 at::make_generator<DeviceGenerator>(1)};
  if (index < 0) index = current_device;
  check_index(index);
  return found[index];
}

at::Generator inner_of(const at::Generator& generator) { return generator.get<DeviceGenerator>()->inner; }

// ---- operations -----------------------------------------------------------------------------------------------------

// Index tensors may be the host's, as on CUDA.
const std::set<std::string> kIndexing{"aten::index",            "aten::index_put",     "aten::index_put_",
                                      "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};

void note_device(const Tensor& tensor, const c10::OperatorHandle& op, std::optional<Device>& found) {
  if (!tensor.defined()) return;
  bool may_be_anywhere = tensor.device().is_cpu() && (tensor.dim() == 0 || kIndexing.count(op.schema().name()));
  if (may_be_anywhere) return;
  if (!found) found = tensor.device();
  TORCH_CHECK(*found == tensor.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
              tensor.device(), "! (when calling ", op.schema().name(), ")");
}

DeviceIndex common_device(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  std::optional<Device> found, named;
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      note_device(argument.toTensor(), op, found);
    } else if (argument.isList()) {
      for (const c10::IValue& item : argument.toListRef())
        if (item.isTensor()) note_device(item.toTensor(), op, found);
    } else if (argument.isDevice()) {
      named = argument.toDevice();
    }
  }
  auto device = found ? found : named;
  return device && device->has_index() ? device->index() : current_device;
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  DeviceIndex index = common_device(op, arguments);
  bool takes_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
    takes_generator = true;
    auto& argument = (*stack)[stack->size() - arguments.size() + i];
    auto given = argument.isNone() ? default_generator(index) : argument.toGenerator();
    TORCH_CHECK(given.device().type() == kType, "Expected a '", Device(kType),
                "' device type for generator but found '", given.device().type(), "'");
    argument = inner_of(given);
  }
  if (takes_generator || !op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
    return;
  }
  // It draws from the host's default generator, which lends itself.
  static std::mutex lends;
  std::lock_guard<std::mutex> lock(lends);
  auto host = at::detail::getDefaultCPUGenerator();
  auto own = inner_of(default_generator(index));
  auto before = host.get_state();
  host.set_state(own.get_state());
  auto restore = [&] {
    own.set_state(host.get_state());
    host.set_state(before);
  };
  try {
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

c10::OperatorHandle operation(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// torch asks other kinds of devices for convolutions by names of their own.

void convolve(const c10::OperatorHandle&, torch::jit::Stack* stack) { compute(operation("aten::convolution"), stack); }

void convolve_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto first = stack->end() - op.schema().arguments().size();
  auto weight = first[2].toTensor();
  bool is_transposed = first[6].toBool();
  int64_t num_outputs = is_transposed ? weight.size(1) * first[8].toInt() : weight.size(0);
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{num_outputs}));  // the bias's shape
  compute(operation("aten::convolution_backward"), stack);
}

// Its schema does not say that it writes the running statistics.
void normalize(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto first = stack->end() - op.schema().arguments().size();
  if (!first[3].isNone()) return compute(operation("aten::_native_batch_norm_legit"), stack);
  stack->erase(first + 3, first + 5);
  compute(operation("aten::_native_batch_norm_legit", "no_stats"), stack);
}

template <bool lowers>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  size_t count = op.schema().arguments().size();
  auto dtype = lowers ? at::autocast::get_autocast_dtype(kType) : at::kFloat;
  for (auto item = stack->end() - count; item != stack->end(); ++item)
    if (item->isTensor() && item->toTensor().defined())
      *item = at::autocast::cached_cast(dtype, item->toTensor(), kType);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &is_compatible);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("native_batch_norm", torch::CppFunction::makeFromBoxedFunction<&normalize>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve_backward>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {  // torch 2.9 finds no other way to the one above
  m.impl("_has_compatible_shallow_copy_type", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY(standin, m) {
  m.def("default_generator(int index) -> Generator?",
        [](int64_t index) -> std::optional<at::Generator> { return default_generator(index); });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // those of CUDA's lists that tests use
  for (const char* name : {"mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "conv1d",
                           "conv2d", "conv3d", "_convolution", "prelu", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
  for (const char* name :
       {"exp", "log", "log1p", "pow.Tensor_Scalar", "softplus", "layer_norm", "group_norm", "mse_loss", "nll_loss",
        "cross_entropy_loss", "binary_cross_entropy_with_logits", "l1_loss", "softmax.int", "log_softmax.int", "sum",
        "sum.dim_IntList", "norm.Scalar", "cumsum", "prod"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<false>>());
}

// ---- what torch asks a kind of device -------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    if (device.has_index()) setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kCount; }

  Stream getStream(Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> last{0};
    DeviceIndex index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kType, index), ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = std::exchange(current_streams[stream.device_index()], stream.id());
    return Stream(Stream::UNSAFE, stream.device(), before);
  }
  bool queryStream(const Stream& stream) const override {
    Locked locked;
    bool is_idle = queue_of(stream).tasks.empty();
    run_all(stream);  // time passes between two looks
    return is_idle;
  }
  void synchronizeStream(const Stream& stream) const override { run_all(stream); }
  void synchronizeDevice(const DeviceIndex index) const override {
    Locked locked;
    Device device(kType, index < 0 ? current_device : index);
    auto& own = queues[device.index()];  // the default stream last: what others free too soon has gone by then
    for (auto queue = own.rbegin(); queue != own.rend(); ++queue) run_all(Stream(Stream::UNSAFE, device, queue->first));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Locked locked;
    auto block = block_of(data);
    if (block && stream != block->stream) block->is_used_elsewhere = true;
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked locked;
    delete static_cast<Event*>(*event);
    *event = new Event{stream, queue_of(stream).asked(), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    Event found = *static_cast<Event*>(event);
    if (found.stream != stream) enqueue(stream, [found] { run_until(found.stream, found.position); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Locked locked;
    auto* found = static_cast<Event*>(event);
    bool is_done = queue_of(found->stream).done >= found->position;
    run_until(found->stream, found->position);  // time passes between two looks
    return is_done;
  }
  void synchronizeEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    if (found != nullptr) run_until(found->stream, found->position);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto between = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(between).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kCount; }
  void setCurrentDevice(DeviceIndex index) const override {
    check_index(index);
    current_device = index;
  }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    check_index(index);
    return std::exchange(current_device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

struct Registered {
  Registered() {
    c10::SetAllocator(kType, &allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} registered;

}  // namespace
