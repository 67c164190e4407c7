#include "native_op/native_op.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>

namespace torch_ucx_rpc {

namespace {

using c10::IValue;
using Slots = c10::SmallVector<int64_t, 64>;

// Calls that write to storages of the same stripe take turns. There are many stripes, so two storages seldom share one.
constexpr size_t kStripes = 64;
std::array<std::mutex, kStripes>& stripes() {
  static auto* mutexes = new std::array<std::mutex, kStripes>(); // NOLINT(cppcoreguidelines-owning-memory): see define
  return *mutexes;
}

bool isWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

class NativeOp final : public c10::OperatorKernel {
 public:
  NativeOp(const c10::FunctionSchema& schema, NativeCompiler compiler)
      : name_(schema.name()), compiler_(std::move(compiler)) {
    for (size_t index = 0; index < schema.arguments().size(); ++index) {
      if (isWritten(schema.arguments()[index])) {
        written_.push_back(index);
      }
    }
    if (schema.returns().empty()) {
      return;
    }
    const c10::Argument& result = schema.returns().front();
    resultType_ = result.type()->kind();
    if (result.alias_info() != nullptr) {
      const auto isReturned = [&](size_t index) {
        return schema.arguments()[index].alias_info()->beforeSets() == result.alias_info()->beforeSets();
      };
      returned_ = *std::find_if(written_.begin(), written_.end(), isReturned);
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, c10::Stack* stack) {
    const std::vector<c10::Argument>& declared = op.schema().arguments();
    const std::vector<IValue> arguments(stack->end() - static_cast<int64_t>(declared.size()), stack->end());
    checkGradients(declared, arguments);
    checkOverlaps(arguments);
    const NativeCode code = codeFor(typesOf(arguments));
    Slots slots = slotsOf(arguments);
    const size_t result = slots.size();
    slots.resize(result + 2 + 2 * static_cast<size_t>(code.result.dims)); // enough for a scalar too
    bool hasSucceeded = false;
    {
      const auto turn = takeTurn(arguments);
      hasSucceeded = code.function(slots.data());
      for (const size_t index : written_) { // also after a failure, which may have come half-way
        const at::Tensor& tensor = arguments[index].toTensor();
        if (!tensor.is_inference()) { // inference tensors have no version
          tensor.unsafeGetTensorImpl()->bump_version();
        }
      }
    }
    TORCH_CHECK(hasSucceeded, name_, ": ", compiler_.explain(arguments));
    stack->erase(stack->end() - static_cast<int64_t>(declared.size()), stack->end());
    if (returned_) {
      stack->push_back(arguments[*returned_]);
    } else if (resultType_) {
      stack->push_back(resultOf(&slots[result], code.result));
    }
  }

 private:
  void checkGradients(const std::vector<c10::Argument>& declared, const std::vector<IValue>& arguments) const {
    if (!c10::GradMode::is_enabled()) {
      return;
    }
    for (size_t index = 0; index < arguments.size(); ++index) {
      TORCH_CHECK(
          !arguments[index].isTensor() || !arguments[index].toTensor().requires_grad(),
          name_,
          " has no derivative, and its argument ",
          declared[index].name(),
          " requires grad: call it under torch.no_grad(), or with ",
          declared[index].name(),
          ".detach().");
    }
  }

  // The same checks as in torch's own operators that write.
  void checkOverlaps(const std::vector<IValue>& arguments) const {
    for (const size_t index : written_) {
      const at::Tensor& written = arguments[index].toTensor();
      at::assert_no_internal_overlap(written);
      for (size_t other = 0; other < arguments.size(); ++other) {
        if (other != index && arguments[other].isTensor()) {
          at::assert_no_partial_overlap(written, arguments[other].toTensor());
        }
      }
    }
  }

  static std::vector<TensorType> typesOf(const std::vector<IValue>& arguments) {
    std::vector<TensorType> types;
    for (const IValue& argument : arguments) {
      if (argument.isTensor()) {
        const at::Tensor& tensor = argument.toTensor();
        types.push_back({tensor.scalar_type(), tensor.dim(), tensor.is_contiguous()});
      }
    }
    return types;
  }

  // Compiles without the lock: compiling takes the GIL, whose owner may be waiting for the lock.
  NativeCode codeFor(const std::vector<TensorType>& types) {
    {
      const std::shared_lock lock(mutex_);
      for (const auto& [of, code] : codes_) {
        if (of == types) {
          return code;
        }
      }
    }
    NativeCode code = compiler_.compile(types);
    const std::unique_lock lock(mutex_);
    codes_.emplace_back(types, code);
    return code;
  }

  Slots slotsOf(const std::vector<IValue>& arguments) const {
    Slots slots;
    for (size_t index = 0; index < arguments.size(); ++index) {
      const IValue& argument = arguments[index];
      if (argument.isTensor()) {
        const at::Tensor& tensor = argument.toTensor();
        // A written tensor that was copied lazily gets memory of its own now.
        const bool isWritten = std::find(written_.begin(), written_.end(), index) != written_.end();
        const void* data = isWritten ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
        slots.push_back(reinterpret_cast<int64_t>(data)); // NOLINT(cppcoreguidelines-pro-type-reinterpret-cast)
        slots.append(tensor.sizes().begin(), tensor.sizes().end());
        for (const int64_t stride : tensor.strides()) {
          slots.push_back(stride * tensor.element_size());
        }
      } else if (argument.isDouble()) {
        slots.push_back(std::bit_cast<int64_t>(argument.toDouble()));
      } else {
        slots.push_back(argument.isBool() ? static_cast<int64_t>(argument.toBool()) : argument.toInt());
      }
    }
    return slots;
  }

  // The stripe depends on all bits of the address (Fibonacci hashing): large storages have pages of their own, and
  // begin at the same offset in a page.
  static size_t stripeOf(const at::Tensor& tensor) {
    const uint64_t address = std::hash<const void*>()(tensor.storage().data());
    return (address * 0x9E3779B97F4A7C15) >> (64 - std::countr_zero(kStripes));
  }

  // Locks the stripes of the written storages, in the order of the stripes so that two calls cannot deadlock.
  c10::SmallVector<std::unique_lock<std::mutex>, 4> takeTurn(const std::vector<IValue>& arguments) const {
    c10::SmallVector<size_t, 4> wanted;
    for (const size_t index : written_) {
      wanted.push_back(stripeOf(arguments[index].toTensor()));
    }
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    c10::SmallVector<std::unique_lock<std::mutex>, 4> locks;
    for (const size_t stripe : wanted) {
      locks.emplace_back(stripes()[stripe]);
    }
    return locks;
  }

  IValue resultOf(const int64_t* slots, const TensorType& type) const {
    switch (*resultType_) {
      case c10::TypeKind::IntType:
        return slots[0];
      case c10::TypeKind::BoolType:
        return slots[0] != 0;
      case c10::TypeKind::FloatType:
        return std::bit_cast<double>(slots[0]);
      default:
        return newTensor(slots, type);
    }
  }

  at::Tensor newTensor(const int64_t* slots, const TensorType& type) const {
    // NOLINTBEGIN(cppcoreguidelines-pro-type-reinterpret-cast, performance-no-int-to-ptr)
    auto* const owner = reinterpret_cast<void*>(slots[0]);
    auto* const data = reinterpret_cast<void*>(slots[1]);
    // NOLINTEND(cppcoreguidelines-pro-type-reinterpret-cast, performance-no-int-to-ptr)
    const at::IntArrayRef sizes(slots + 2, static_cast<size_t>(type.dims));
    TORCH_CHECK(
        owner != nullptr,
        name_,
        " returns memory of an argument, and its schema says that it returns a new tensor: return a copy, or write "
        "Tensor(a!) for both.");
    std::shared_ptr<void> owned(owner, compiler_.release);
    const auto itemBytes = static_cast<int64_t>(c10::elementSize(type.dtype));
    std::vector<int64_t> strides(slots + 2 + type.dims, slots + 2 + 2 * type.dims);
    for (int64_t& stride : strides) {
      TORCH_CHECK(
          stride >= 0 && stride % itemBytes == 0,
          name_,
          " returns an array with a stride of ",
          stride,
          " bytes, which no tensor can have: return a copy of it.");
      stride /= itemBytes;
    }
    return at::from_blob(
        data, sizes, strides, [owned = std::move(owned)](void*) mutable { owned.reset(); }, type.dtype);
  }

  const std::string name_;
  const NativeCompiler compiler_;
  // Indices of the written arguments; this and the next two are constant after construction.
  std::vector<size_t> written_;
  std::optional<size_t> returned_; // index of the argument that is returned
  std::optional<c10::TypeKind> resultType_; // none if the operator returns nothing
  std::shared_mutex mutex_;
  // Guarded by mutex_; there are few, so they are searched in turn:
  std::vector<std::pair<std::vector<TensorType>, NativeCode>> codes_;
};

} // namespace

void defineNativeOp(const std::string& schema, NativeCompiler compiler) {
  c10::FunctionSchema parsed = torch::schema(schema.c_str());
  const c10::OperatorName name = parsed.operator_name();
  auto kernel = std::make_unique<NativeOp>(parsed, std::move(compiler));
  // Never destroyed: operators may be called until the process ends. The compiler belongs to Python, which ends before.
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory)
  auto* library = new torch::Library(
      torch::Library::FRAGMENT, std::string(name.getNamespace().value()), std::nullopt, __FILE__, __LINE__);
  library->def(std::move(parsed));
  library->impl(
      c10::toString(name).c_str(),
      torch::dispatch(c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel))));
}

} // namespace torch_ucx_rpc
