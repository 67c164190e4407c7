#pragma once

#include <string>
#include <string_view>

namespace torch_ucx_rpc {

// The address of a UCX worker as this package passes it on. UCX asserts what it reads in one: so it has something in front that
// makes an error of a damaged or foreign one.
std::string sealAddress(std::string_view ucxAddress);

// UCX's part of what sealAddress() has returned; empty for anything else. Valid as long as `address` is.
std::string_view openAddress(std::string_view address);

} // namespace torch_ucx_rpc
