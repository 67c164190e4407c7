#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_ucx_rpc {

// While this object lives, torch's operators on this thread take tensors as they are, make ordinary ones, and record
// nothing for autograd. Encoding and decoding need this, because they run on the user's threads too: a waiting caller
// decodes its own answer. That thread may be inside inference mode, autocast, FakeTensorMode or a transform of
// torch.func. All of them are dispatch keys of the thread, and inference mode is also a flag.
//
// The guard only writes thread-local variables, so it needs no check for a mode that is on.
class OutsideModes {
 public:
  OutsideModes() {
    c10::AutogradState::get_tls_state().set_inference_mode(false);
  }
  ~OutsideModes() {
    c10::AutogradState::get_tls_state().set_inference_mode(wasInference_);
  }
  OutsideModes(const OutsideModes&) = delete;
  OutsideModes& operator=(const OutsideModes&) = delete;

 private:
  // The keys by which Python code of a mode, or of a tensor's subclass, would run.
  static constexpr c10::DispatchKeySet kPython{
      c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher};

  const bool wasInference_ = c10::AutogradState::get_tls_state().get_inference_mode();
  const c10::impl::ForceDispatchKeyGuard keys_{
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView | kPython};
};

} // namespace torch_ucx_rpc
