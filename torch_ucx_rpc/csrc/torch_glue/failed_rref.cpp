#include "torch_glue/failed_rref.h"

#include "torch_glue/torch_state.h"

#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/jit/mobile/type_parser.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;
using torch::distributed::rpc::JitFuture;
using torch::distributed::rpc::Message;

namespace {

// torch compares the type with the types of references that reach the owner.
c10::TypePtr typeOf(const std::string& name) {
  try {
    return name.empty() ? c10::PyObjectType::get() : c10::parseType(name);
  } catch (const std::exception&) {
    return c10::AnyType::get(); // a class of TorchScript, which this worker may not have
  }
}

} // namespace

c10::intrusive_ptr<Message> describeFailedRRef(const JitFuture& creation, const std::string& why) {
  const std::optional<CreatedRRef> created = findCreatedRRef(creation);
  if (!created) {
    return nullptr;
  }
  const rpc::RRef& rref = *created->rref;
  std::vector<char> payload = torch::jit::pickle(c10::ivalue::Tuple::create(
      rref.rrefId().toIValue(),
      created->reference.toIValue(),
      rref.isPyObj() ? std::string() : rref.type()->annotation_str(),
      why));
  return c10::make_intrusive<Message>(std::move(payload), std::vector<at::Tensor>{}, rpc::MessageType::EXCEPTION);
}

bool isFailedRRef(const Message& request) {
  return request.type() == rpc::MessageType::EXCEPTION;
}

c10::intrusive_ptr<JitFuture> makeFailedRRef(const Message& request) {
  const c10::IValue fields = torch::jit::unpickle(request.payload().data(), request.payload().size());
  const auto& elements = fields.toTupleRef().elements();
  TORCH_CHECK(elements.size() == 4, "malformed message: the failure of an RRef has four fields");
  const auto id = rpc::RRefId::fromIValue(elements[0]);
  const auto reference = rpc::ForkId::fromIValue(elements[1]);
  rpc::RRefContext& context = rpc::RRefContext::getInstance();
  c10::intrusive_ptr<rpc::OwnerRRef> rref;
  if (id == reference) { // of a call to oneself: the caller's RRef is the owner's
    constexpr bool kMustExist = true;
    rref = rpc::fromRRefInterface(context.getOwnerRRef(id, kMustExist)->constValue().toRRef());
  } else {
    rref = context.getOrCreateOwnerRRef(id, typeOf(elements[2].toStringRef()));
    context.addForkOfOwnerIfNotPresent(id, reference);
  }
  rref->setError(std::make_exception_ptr(std::runtime_error(elements[3].toStringRef())));
  auto answer = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
  answer->markCompleted(rpc::RemoteRet(id, reference).toMessage());
  return answer;
}

} // namespace torch_ucx_rpc
