#pragma once

namespace torch_ucx_rpc {

// A reserve of files for UCX, for the moment when the process may open no more. UCX does not expect a lack of files,
// and does not survive it:
// - It closes its TCP port for good when it cannot accept a connection (uct_tcp_iface_connect_handler()). Workers that
//   come later could not call this one. With this class, such a connection waits until there is a file.
// - It opens a socket to look at a network card. If it cannot, it never uses the card again ("cannot find remote
//   protocol"), or ends the process ("failed to set active message handler"). With this class, the socket gets a file
//   of the reserve.
//
// This class also makes UCX's TCP sockets resend every second during a cut, instead of ever less often.
//
// UCX has no setting for any of this. So the first object replaces accept(), epoll_wait() and socket() in the list of
// functions that libucs imports. They stay replaced for the rest of the process. All objects of this class share one
// reserve, which the last one gives back.
class FilesForUcx {
 public:
  FilesForUcx();
  ~FilesForUcx();
  FilesForUcx(const FilesForUcx&) = delete;
  FilesForUcx& operator=(const FilesForUcx&) = delete;

  // False if libucs has no such imports: UCX then works as without this class.
  bool isUsed() const {
    return isUsed_;
  }

 private:
  const bool isUsed_;
};

} // namespace torch_ucx_rpc
