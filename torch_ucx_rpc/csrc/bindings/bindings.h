#pragma once

// Not torch's, which takes long to compile: sources that need its conversions include that. Every source gets the
// conversions of the standard library: without them it would compile, and its conversions would throw.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

// Each function binds one source of this folder to Python. torch_ucx_rpc/_C.pyi documents what they bind, and each
// source says where the GIL is held.
namespace torch_ucx_rpc {

// Turns C++ exceptions into exceptions of torch_ucx_rpc.errors, or into the one that a callee raised.
void bindErrors(pybind11::module_& module);

// The agents, what they are made of, their statistics, and the devices of futures.
void bindAgents(pybind11::module_& module);

// The values that an agent sends and receives under tags.
void bindChannels(pybind11::module_& module);

// Operators of torch whose kernels a Python compiler makes.
void bindNativeOps(pybind11::module_& module);

// Questions of the pickler about tensors, and a context in which modes do not apply.
void bindTensors(pybind11::module_& module);

// The agent's warnings.
void bindWarnings(pybind11::module_& module);

} // namespace torch_ucx_rpc
