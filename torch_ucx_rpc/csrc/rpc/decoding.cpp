#include "rpc/decoding.h"

#include <c10/core/StreamGuard.h>

#include <exception>
#include <utility>

namespace torch_ucx_rpc {

Error decodeArrived(
    Messenger& messenger,
    const DeviceMaps& deviceMaps,
    IncomingMessage arrived,
    Streams& streams,
    DecodedMessage& decoded) {
  if (Error error = messenger.checkContent(arrived)) {
    return error;
  }
  try {
    const Devices& devices = deviceMaps.devices();
    streams = deviceMaps.takeStreams(devices);
    // The copy of a message to oneself may still be under way. The decoder's copies and the handler come after it.
    arrived.pendingWork.blockStreams(streams);
    const c10::MultiStreamGuard guard(streams);
    return decodeMessage(std::move(arrived), devices, decoded);
  } catch (const std::exception& failure) {
    return deviceFailed(failure);
  }
}

} // namespace torch_ucx_rpc
