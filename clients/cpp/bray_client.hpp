// Bray game client for C++17: one header, no dependencies, HTTP and framed TCP. The protocol: docs/protocol.md.
// For TLS define BRAY_TLS and link OpenSSL 1.1 or later (ssl, crypto); then set Options::tls.
//
//     bray::Client client("127.0.0.1", 8000);
//     client.start();
//     std::string reply = client.tick(bytes);
//     client.end();
//
// Each call blocks until its reply, at most `timeout` seconds, retries included. It returns the Actor's bytes or
// throws:
//
//     ClientError            the server answered with an error; status, code and message say which
//       SessionLost          404: the session is unknown, ended, expired or its worker died: start() again
//       ConnectFailed        the request did not leave whole: nothing was executed
//       ConnectionLost       the request left and no reply came: it may or may not have been executed
//
// What was not executed is sent again up to `retries` times with growing pauses (no connection, 503, and 429 at start
// or step). A request that was sent but not answered is sent again only with idempotent = true.
//
// A client plays one session at a time and belongs to one thread at a time.
// On Windows link ws2_32 (done here for MSVC).

#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#ifdef _WIN32
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <winsock2.h>
#include <ws2tcpip.h>
#ifdef _MSC_VER
#pragma comment(lib, "ws2_32.lib")
#endif
#else
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#endif

#ifdef BRAY_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#endif

namespace bray {

// Status is 0 where no server answered; code is then connect_failed, connection_lost, timeout, bad_reply or
// not_started.
class ClientError : public std::runtime_error {
public:
    ClientError(int status_, std::string code_, std::string message_, double retry_after_ = -1)
        : std::runtime_error((status_ ? std::to_string(status_) + " " : std::string()) + code_ + ": " + message_),
          status(status_), code(std::move(code_)), message(std::move(message_)), retry_after(retry_after_) {}

    int status;
    std::string code;
    std::string message;
    double retry_after;  // seconds the server asks to wait; below 0 where it does not say
};

class SessionLost : public ClientError {
    using ClientError::ClientError;
};

class ConnectFailed : public ClientError {
    using ClientError::ClientError;
};

class ConnectionLost : public ClientError {
    using ClientError::ClientError;
};

struct Options {
    std::string host = "127.0.0.1";
    std::uint16_t port = 8000;
    double timeout = 60;  // seconds for each call, waiting and retries included
    bool tcp = false;     // framed TCP instead of HTTP
    std::string session;  // a fixed name; empty: every start() makes a new one
    std::string token;    // checked by services that have one
    std::string key;      // reaches the Actor unread
    bool tls = false;     // needs BRAY_TLS
    std::string tls_ca;   // a certificate (PEM file) to trust; empty: those that the system trusts
    int retries = 5;
};

namespace detail {

using Clock = std::chrono::steady_clock;

constexpr std::size_t max_head = 64 * 1024;
constexpr std::uint64_t max_reply = std::uint64_t(1) << 30;
constexpr char error_mark[] = "\0BRAYERR";
constexpr std::size_t error_mark_size = 8;

#ifdef _WIN32
using Socket = SOCKET;
using Size = int;  // of what is sent
constexpr Socket no_socket = INVALID_SOCKET;
inline void close_socket(Socket s) { ::closesocket(s); }
inline int last_error() { return ::WSAGetLastError(); }
inline bool would_block(int e) { return e == WSAEWOULDBLOCK || e == WSAEINPROGRESS; }
inline void set_nonblocking(Socket s) {
    u_long on = 1;
    ::ioctlsocket(s, FIONBIO, &on);
}
inline void start_sockets() {
    struct Library {
        Library() {
            WSADATA data;
            ::WSAStartup(MAKEWORD(2, 2), &data);
        }
        ~Library() { ::WSACleanup(); }
    };
    static Library library;
}
inline std::string error_text(int e) { return "Windows socket error " + std::to_string(e); }
#else
using Socket = int;
using Size = std::size_t;
constexpr Socket no_socket = -1;
inline void close_socket(Socket s) { ::close(s); }
inline int last_error() { return errno; }
inline bool would_block(int e) { return e == EAGAIN || e == EWOULDBLOCK || e == EINPROGRESS || e == EINTR; }
inline void set_nonblocking(Socket s) { ::fcntl(s, F_SETFL, ::fcntl(s, F_GETFL, 0) | O_NONBLOCK); }
inline void start_sockets() {}
inline std::string error_text(int e) { return std::strerror(e); }
#endif

#ifdef MSG_NOSIGNAL
constexpr int send_flags = MSG_NOSIGNAL;
#else
constexpr int send_flags = 0;
#endif

// Wait until the socket can be read (or written); false when the deadline passes first.
inline bool wait_for(Socket s, bool writing, Clock::time_point deadline) {
    for (;;) {
        auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
        left = std::max<decltype(left)>(left, 0);
#ifdef _WIN32
        fd_set ready, failed;  // a refused connection is reported as an exception there
        FD_ZERO(&ready);
        FD_ZERO(&failed);
        FD_SET(s, &ready);
        FD_SET(s, &failed);
        timeval time;
        time.tv_sec = static_cast<long>(left / 1000000);
        time.tv_usec = static_cast<long>(left % 1000000);
        int n = ::select(0, writing ? nullptr : &ready, writing ? &ready : nullptr, &failed, &time);
#else
        pollfd one{s, static_cast<short>(writing ? POLLOUT : POLLIN), 0};
        int n = ::poll(&one, 1, static_cast<int>(std::min<long long>((left + 999) / 1000, 1000000)));
#endif
        if (n > 0) return true;
        if (n < 0 && !would_block(last_error())) return true;  // the next call on the socket says why
        if (Clock::now() >= deadline) return false;
    }
}

inline void put_int64(std::string& out, std::uint64_t value) {
    for (int shift = 56; shift >= 0; shift -= 8) out.push_back(static_cast<char>((value >> shift) & 0xff));
}

inline std::uint64_t get_int64(const char* at) {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = (value << 8) | static_cast<unsigned char>(at[i]);
    return value;
}

inline std::string lower(std::string text) {
    for (char& c : text)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    return text;
}

inline std::string strip(const std::string& text) {
    std::size_t first = text.find_first_not_of(" \t");
    if (first == std::string::npos) return "";
    return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// Bytes from the network, fit for a message.
inline std::string shown(const std::string& bytes) {
    std::string out = bytes.substr(0, 60);
    for (char& c : out)
        if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
    return "'" + out + "'";
}

inline bool digits(const std::string& text, std::size_t most = 10) {
    return !text.empty() && text.size() <= most && text.find_first_not_of("0123456789") == std::string::npos;
}

inline void put_utf8(std::string& out, unsigned c) {
    if (c < 0x80) {
        out.push_back(static_cast<char>(c));
    } else if (c < 0x800) {
        out.push_back(static_cast<char>(0xc0 | (c >> 6)));
        out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    } else if (c < 0x10000) {
        out.push_back(static_cast<char>(0xe0 | (c >> 12)));
        out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3f)));
        out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    } else {
        out.push_back(static_cast<char>(0xf0 | (c >> 18)));
        out.push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3f)));
        out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3f)));
        out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    }
}

// Four hex digits at `at`; false where there are none.
inline bool hex4(const std::string& text, std::size_t at, unsigned& value) {
    if (at + 4 > text.size()) return false;
    value = 0;
    for (std::size_t i = at; i < at + 4; ++i) {
        char c = lower(std::string(1, text[i]))[0];
        if (c >= '0' && c <= '9')
            value = value * 16 + static_cast<unsigned>(c - '0');
        else if (c >= 'a' && c <= 'f')
            value = value * 16 + static_cast<unsigned>(c - 'a' + 10);
        else
            return false;
    }
    return true;
}

// The string under a key of a flat JSON object; empty where there is none.
// A quote inside a JSON string is escaped, so "key" with its quotes cannot be found inside one.
inline std::string json_string(const std::string& json, const std::string& key) {
    std::size_t at = json.find("\"" + key + "\"");
    if (at == std::string::npos) return "";
    at = json.find_first_not_of(" \t\r\n:", at + key.size() + 2);
    if (at == std::string::npos || json[at] != '"') return "";
    std::string out;
    for (++at; at < json.size() && json[at] != '"'; ++at) {
        if (json[at] != '\\') {
            out.push_back(json[at]);
            continue;
        }
        if (++at >= json.size()) break;
        static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
        unsigned c = 0, low = 0;
        if (const char* found = std::strchr(from, json[at])) {
            out.push_back(to[found - from]);
        } else if (json[at] == 'u' && hex4(json, at + 1, c)) {
            at += 4;
            if (c >= 0xd800 && c < 0xdc00 && json.compare(at + 1, 2, "\\u") == 0 && hex4(json, at + 3, low)) {
                c = 0x10000 + ((c - 0xd800) << 10) + ((low - 0xdc00) & 0x3ff);
                at += 6;
            }
            put_utf8(out, c);
        } else {
            out.push_back(json[at]);
        }
    }
    return out;
}

inline int status_of(const std::string& code) {
    static const std::pair<const char*, int> table[] = {
        {"malformed", 400},    {"bad_kind", 400},   {"bad_token", 401},        {"no_session", 404},
        {"bad_secret", 403},   {"too_many_connections", 429}, {"too_many_requests", 429}, {"too_many_sessions", 429},
        {"no_path", 404},      {"bad_method", 405}, {"slow_request", 408},     {"session_exists", 409},
        {"too_large", 413},    {"no_free_slot", 429}, {"header_too_large", 431}, {"actor_error", 500},
        {"overloaded", 503},   {"draining", 503},   {"tick_timeout", 504},
    };
    for (const auto& row : table)
        if (code == row.first) return row.second;
    return 500;
}

inline std::string unique_name() {
    std::random_device device;
    char text[33];
    std::snprintf(text, sizeof text, "%08x%08x%08x%08x", device(), device(), device(),
                  device() ^ static_cast<unsigned>(Clock::now().time_since_epoch().count()));
    return text;
}

inline ConnectionLost bad_reply(const std::string& message) { return ConnectionLost(0, "bad_reply", message); }

struct Reply {
    std::string body;
    int status = 0;  // of HTTP; 0 over TCP
    double retry_after = -1;
    bool keep = true;
    std::string session;  // what TCP echoes
    std::uint64_t time = 0;
    std::string secret;  // what further requests of the session must carry
};

#ifdef BRAY_TLS
// OpenSSL's own socket BIO ends the program with SIGPIPE where the server has closed; this one sends as we do.
inline int bio_write(BIO* bio, const char* data, int size) {
    BIO_clear_retry_flags(bio);
    auto n = ::send(*static_cast<Socket*>(BIO_get_data(bio)), data, static_cast<Size>(size), send_flags);
    if (n < 0 && would_block(last_error())) BIO_set_retry_write(bio);
    return static_cast<int>(n);
}

inline int bio_read(BIO* bio, char* data, int size) {
    BIO_clear_retry_flags(bio);
    auto n = ::recv(*static_cast<Socket*>(BIO_get_data(bio)), data, static_cast<Size>(size), 0);
    if (n < 0 && would_block(last_error())) BIO_set_retry_read(bio);
    return static_cast<int>(n);
}

inline long bio_control(BIO*, int what, long, void*) { return what == BIO_CTRL_FLUSH ? 1 : 0; }

inline BIO* socket_bio(Socket* socket) {
    static BIO_METHOD* method = [] {
        BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "bray socket");
        BIO_meth_set_write(made, bio_write);
        BIO_meth_set_read(made, bio_read);
        BIO_meth_set_ctrl(made, bio_control);
        return made;
    }();
    BIO* bio = BIO_new(method);
    BIO_set_data(bio, socket);
    BIO_set_init(bio, 1);
    return bio;
}

inline std::string tls_error() {
    char text[256] = "the TLS handshake failed";
    if (unsigned long code = ::ERR_get_error()) ::ERR_error_string_n(code, text, sizeof text);
    return text;
}
#endif

}  // namespace detail

class Client {
public:
    explicit Client(Options options) : options_(std::move(options)), session_(options_.session) {
        detail::start_sockets();
        if (!(options_.timeout > 0)) throw std::invalid_argument("timeout: expected seconds > 0");
        if (options_.retries < 0) throw std::invalid_argument("retries: expected 0 or more");
        check("session", options_.session);
        check("token", options_.token);
        check("key", options_.key);
#ifdef BRAY_TLS
        if (options_.tls) make_context();
#else
        if (options_.tls) throw std::invalid_argument("tls: this program was built without BRAY_TLS");
#endif
    }

    Client(const std::string& host, std::uint16_t port, bool tcp = false) : Client(make_options(host, port, tcp)) {}

    ~Client() {
        close();
#ifdef BRAY_TLS
        ::SSL_CTX_free(context_);
#endif
    }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    Client(Client&& other) noexcept
        : options_(std::move(other.options_)), session_(std::move(other.session_)), secret_(std::move(other.secret_)),
          buffer_(std::move(other.buffer_)), socket_(std::exchange(other.socket_, detail::no_socket)),
          time_(other.time_) {
#ifdef BRAY_TLS
        context_ = std::exchange(other.context_, nullptr);
        ssl_ = std::exchange(other.ssl_, nullptr);
        if (ssl_) BIO_set_data(SSL_get_rbio(ssl_), &socket_);
#endif
    }
    Client& operator=(Client&&) = delete;

    // The name of the session; empty before the first start().
    const std::string& session() const { return session_; }

    // Start a session. Its name is `game`, or `game-agent-name` with an agent; a new unique game where none is given.
    std::string start(const std::string& game = "", const std::string& agent = "", const std::string& data = "") {
        std::string name = options_.session;
        if (!game.empty() || !agent.empty() || name.empty()) {
            name = game.empty() ? detail::unique_name() : game;
            if (!agent.empty()) name += "-agent-" + agent;
        }
        check("session", name);
        session_ = std::move(name);
        secret_.clear();
        return request("start", data, false);
    }

    // One decision: send the state of the game, get the Actor's answer.
    std::string tick(const std::string& data, bool idempotent = false) {
        need_session();
        return request("tick", data, idempotent);
    }

    // End the session; returns the Actor's last answer.
    std::string end(const std::string& data = "") {
        need_session();
        return request("end", data, false);
    }

    std::string stop(const std::string& data = "") { return end(data); }

    // A decision without a session.
    std::string step(const std::string& data, bool idempotent = false) { return request("auto", data, idempotent); }

    // Close the connection. The session lives on until it is ended or expires.
    void close() {
#ifdef BRAY_TLS
        ::SSL_free(ssl_);
        ssl_ = nullptr;
#endif
        if (socket_ != detail::no_socket) detail::close_socket(socket_);
        socket_ = detail::no_socket;
        buffer_.clear();
    }

private:
    using Clock = detail::Clock;
    using Deadline = Clock::time_point;

    static Options make_options(const std::string& host, std::uint16_t port, bool tcp) {
        Options options;
        options.host = host;
        options.port = port;
        options.tcp = tcp;
        return options;
    }

    static void check(const char* name, const std::string& value) {
        bool blank = !value.empty() && (value.front() == ' ' || value.back() == ' ');
        for (char c : value) blank = blank || static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
        if (blank)
            throw std::invalid_argument(std::string(name) +
                                        ": expected text without control characters or blanks around it");
    }

    void need_session() const {
        if (session_.empty())
            throw ClientError(0, "not_started", "expected a session, there is none: call start() first");
    }

    std::string where() const {
        return "session '" + session_ + "' at " + options_.host + ":" + std::to_string(options_.port);
    }

    // --- sending again ---------------------------------------------------------------------------------------------

    std::string request(const std::string& kind, const std::string& data, bool idempotent) {
        Deadline deadline = Clock::now() + seconds(options_.timeout);
        double pause = 0.05;
        for (int left = options_.retries;; --left) {
            double wait = pause * random_half();
            pause = std::min(2 * pause, 2.0);
            try {
                return exchange(kind, data, deadline);
            } catch (const ClientError& error) {
                if (error.retry_after > 0) wait += error.retry_after;
                if (left <= 0 || !harmless(error, kind, idempotent) || Clock::now() + seconds(wait) >= deadline) throw;
            }
            std::this_thread::sleep_for(seconds(wait));
        }
    }

    // Whether sending again cannot execute the request twice (or may).
    static bool harmless(const ClientError& error, const std::string& kind, bool idempotent) {
        if (error.code == "bad_certificate") return false;
        if (error.status == 503 || dynamic_cast<const ConnectFailed*>(&error)) return true;
        if (error.status == 429) return kind == "start" || kind == "auto";
        return idempotent && dynamic_cast<const ConnectionLost*>(&error);
    }

    static std::chrono::microseconds seconds(double s) {
        return std::chrono::microseconds(static_cast<long long>(s * 1e6));
    }

    // Between a half and one, so that a thousand games do not come back in the same millisecond.
    static double random_half() {
        thread_local std::minstd_rand generator{std::random_device{}()};
        return std::uniform_real_distribution<double>(0.5, 1.0)(generator);
    }

    // --- one request and its reply ---------------------------------------------------------------------------------

    std::string exchange(const std::string& kind, const std::string& data, Deadline deadline) {
        const std::string session = kind == "auto" ? std::string() : session_;
        ++time_;
        const std::string message = options_.tcp ? tcp_message(session, kind, data) : http_message(session, kind, data);
        detail::Reply reply;
        bool sent = false;
        try {
            connect(deadline);
            sent = send_all(message, deadline);
            // A server that refuses a large body answers and closes before all of it was sent.
            if (!sent) deadline = std::min(deadline, Clock::now() + std::chrono::seconds(1));
            if (!(options_.tcp ? read_tcp(reply, deadline) : read_http(reply, deadline)))
                throw_lost(sent, "the server closed the connection", false);
        } catch (const TimedOut&) {
            close();
            throw_lost(sent, "no reply within the timeout", true);
        } catch (...) {
            close();  // a late reply would pass for the next request's
            throw;
        }
        bool failed = is_error(reply);
        if (options_.tcp && (reply.session != session || reply.time != time_) && !(failed && reply.session.empty())) {
            close();
            throw detail::bad_reply("expected the reply to request " + std::to_string(time_) + ", got another's");
        }
        if (!reply.keep) close();
        if (failed) raise_error(reply);
        if (kind == "start") secret_ = reply.secret;
        return std::move(reply.body);
    }

    struct TimedOut {};

    [[noreturn]] void throw_lost(bool sent, const std::string& reason, bool timed_out) const {
        if (sent)
            throw ConnectionLost(0, timed_out ? "timeout" : "connection_lost",
                                 reason + " (" + where() + "). The request was sent; it may have been executed");
        throw ConnectFailed(0, timed_out ? "timeout" : "connect_failed",
                            reason + " (" + where() + "). Nothing was executed. Is the service running there?");
    }

    std::string http_message(const std::string& session, const std::string& kind, const std::string& data) const {
        bool ipv6 = options_.host.find(':') != std::string::npos;
        std::string out = "POST /step HTTP/1.1\r\nHost: ";
        out += (ipv6 ? "[" + options_.host + "]" : options_.host) + ":" + std::to_string(options_.port);
        out += "\r\nstep_kind: " + kind;
        if (!session.empty()) out += "\r\nsession: " + session;
        if (!options_.key.empty()) out += "\r\nkey: " + options_.key;
        if (!options_.token.empty()) out += "\r\ntoken: " + options_.token;
        if (!secret_.empty() && kind != "auto") out += "\r\nsession_secret: " + secret_;
        out += "\r\nContent-Length: " + std::to_string(data.size()) + "\r\n\r\n";
        return out += data;
    }

    std::string tcp_message(const std::string& session, const std::string& kind, const std::string& data) const {
        std::string out;
        out.reserve(48 + session.size() + kind.size() + options_.key.size() + options_.token.size() + data.size());
        for (std::size_t size : {session.size(), kind.size(), options_.key.size(), options_.token.size(), data.size()})
            detail::put_int64(out, size);
        detail::put_int64(out, time_);
        return out.append(session).append(kind).append(options_.key).append(options_.token).append(data);
    }

    bool is_error(const detail::Reply& reply) const {
        if (!options_.tcp) return reply.status < 200 || reply.status >= 300;
        return reply.body.compare(0, detail::error_mark_size, detail::error_mark, detail::error_mark_size) == 0;
    }

    [[noreturn]] void raise_error(const detail::Reply& reply) const {
        const std::string json = options_.tcp ? reply.body.substr(detail::error_mark_size) : reply.body;
        std::string code = detail::json_string(json, "error"), message = detail::json_string(json, "message");
        int status = options_.tcp ? detail::status_of(code) : reply.status;
        if (code.empty()) {  // a proxy's page
            code = "http_" + std::to_string(status);
            message = json.substr(0, 200);
        }
        message += " (" + where() + ")";
        if (status == 404 && code != "no_path")
            throw SessionLost(status, code, message + "; start the session again", reply.retry_after);
        throw ClientError(status, code, message, reply.retry_after);
    }

    // --- the connection --------------------------------------------------------------------------------------------

    void connect(Deadline deadline) {
        if (socket_ != detail::no_socket && ended()) close();
        if (socket_ != detail::no_socket) return;
        addrinfo hints{};
        hints.ai_socktype = SOCK_STREAM;
        addrinfo* found = nullptr;
        if (::getaddrinfo(options_.host.c_str(), std::to_string(options_.port).c_str(), &hints, &found) != 0 || !found)
            throw_lost(false, "host '" + options_.host + "' has no address", false);
        struct Freed {
            addrinfo* list;
            ~Freed() { ::freeaddrinfo(list); }
        } freed{found};
        std::string reason;
        for (addrinfo* a = found; a; a = a->ai_next) {
            socket_ = ::socket(a->ai_family, a->ai_socktype, a->ai_protocol);
            if (socket_ == detail::no_socket) continue;
            detail::set_nonblocking(socket_);
            int on = 1;
            ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, reinterpret_cast<const char*>(&on), sizeof on);
#ifdef SO_NOSIGPIPE
            ::setsockopt(socket_, SOL_SOCKET, SO_NOSIGPIPE, reinterpret_cast<const char*>(&on), sizeof on);
#endif
            int error = 0;
            if (::connect(socket_, a->ai_addr, static_cast<socklen_t>(a->ai_addrlen)) != 0) {
                error = detail::last_error();
                if (detail::would_block(error)) {
                    if (!detail::wait_for(socket_, true, deadline)) throw TimedOut{};
                    socklen_t size = sizeof error;
                    ::getsockopt(socket_, SOL_SOCKET, SO_ERROR, reinterpret_cast<char*>(&error), &size);
                }
            }
            if (error == 0) return handshake(deadline);
            reason = detail::error_text(error);
            close();
        }
        throw_lost(false, reason, false);
    }

    // Readable while nothing is asked for: the server closed it while it was idle.
    bool ended() {
        if (!detail::wait_for(socket_, false, Clock::now())) return false;
#ifdef BRAY_TLS
        char byte;  // TLS 1.3 has messages of its own, which only reading tells from the end
        if (ssl_) return SSL_get_error(ssl_, ::SSL_peek(ssl_, &byte, 1)) != SSL_ERROR_WANT_READ;
#endif
        return true;
    }

#ifdef BRAY_TLS
    void make_context() {
        context_ = ::SSL_CTX_new(TLS_client_method());
        SSL_CTX_set_min_proto_version(context_, TLS1_2_VERSION);
        SSL_CTX_set_mode(context_, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        SSL_CTX_set_verify(context_, SSL_VERIFY_PEER, nullptr);
        const char* file = options_.tls_ca.c_str();
        if (options_.tls_ca.empty() ? !SSL_CTX_set_default_verify_paths(context_)
                                    : !SSL_CTX_load_verify_locations(context_, file, nullptr))
            throw std::invalid_argument("tls_ca: no certificate can be read from '" + options_.tls_ca + "'");
    }

    void handshake(Deadline deadline) {
        if (!options_.tls) return;
        ssl_ = ::SSL_new(context_);
        BIO* bio = detail::socket_bio(&socket_);
        ::SSL_set_bio(ssl_, bio, bio);
        const char* host = options_.host.c_str();
        if (!X509_VERIFY_PARAM_set1_ip_asc(::SSL_get0_param(ssl_), host)) {  // it is a name
            ::SSL_set1_host(ssl_, host);
            SSL_set_tlsext_host_name(ssl_, host);
        }
        if (tls_call([this] { return ::SSL_connect(ssl_); }, deadline)) return;
        std::string reason = detail::tls_error();
        long verified = ::SSL_get_verify_result(ssl_);
        close();
        if (verified == X509_V_OK) throw_lost(false, reason, false);
        throw ConnectFailed(0, "bad_certificate",
                            std::string("the service's certificate is not trusted: ") +
                                ::X509_verify_cert_error_string(verified) + " (" + where() +
                                "). Options::tls_ca may name a certificate to trust");
    }

    // What a call returned when it was done; 0 where the connection has ended.
    template <class Call>
    int tls_call(Call call, Deadline deadline) {
        for (;;) {
            ::ERR_clear_error();
            int n = call();
            if (n > 0) return n;
            int error = ::SSL_get_error(ssl_, n);
            if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) return 0;
            if (!detail::wait_for(socket_, error == SSL_ERROR_WANT_WRITE, deadline)) throw TimedOut{};
        }
    }
#else
    void handshake(Deadline) {}
#endif

    // False when the server closed before all was sent; then it cannot have executed the request.
    bool send_all(const std::string& data, Deadline deadline) {
        std::size_t at = 0;
        while (at < data.size()) {
            auto size = static_cast<detail::Size>(std::min<std::size_t>(data.size() - at, 1 << 20));
#ifdef BRAY_TLS
            if (ssl_) {
                const char* from = data.data() + at;
                int n = tls_call([&] { return ::SSL_write(ssl_, from, static_cast<int>(size)); }, deadline);
                if (!n) return false;
                at += static_cast<std::size_t>(n);
                continue;
            }
#endif
            auto n = ::send(socket_, data.data() + at, size, detail::send_flags);
            if (n > 0) {
                at += static_cast<std::size_t>(n);
            } else if (detail::would_block(detail::last_error())) {
                if (!detail::wait_for(socket_, true, deadline)) throw TimedOut{};
            } else {
                return false;
            }
        }
        return true;
    }

    // More bytes into the buffer; false at the end of the connection.
    bool receive(Deadline deadline) {
        char piece[65536];
#ifdef BRAY_TLS
        if (ssl_) {
            int n = tls_call([&] { return ::SSL_read(ssl_, piece, sizeof piece); }, deadline);
            buffer_.append(piece, static_cast<std::size_t>(n));
            return n > 0;
        }
#endif
        for (;;) {
            auto n = ::recv(socket_, piece, sizeof piece, 0);
            if (n > 0) {
                buffer_.append(piece, static_cast<std::size_t>(n));
                return true;
            }
            if (n == 0 || !detail::would_block(detail::last_error())) return false;
            if (!detail::wait_for(socket_, false, deadline)) throw TimedOut{};
        }
    }

    // --- replies; false: the connection ended before the reply was whole ---------------------------------------------

    bool read_tcp(detail::Reply& reply, Deadline deadline) {
        while (buffer_.size() < 24)
            if (!receive(deadline)) return false;
        std::uint64_t session = detail::get_int64(&buffer_[0]), body = detail::get_int64(&buffer_[8]);
        reply.time = detail::get_int64(&buffer_[16]);
        if (buffer_.compare(0, 5, "HTTP/") == 0)
            throw detail::bad_reply("expected a framed TCP reply, got HTTP: use tcp = false, or switch use_tcp on in "
                                    "the service");
        if (session > detail::max_head || body > detail::max_reply)
            throw detail::bad_reply("expected the lengths of a framed reply, got " + std::to_string(session) + " and " +
                                    std::to_string(body));
        while (buffer_.size() < 24 + session + body)
            if (!receive(deadline)) return false;
        reply.session = buffer_.substr(24, session);
        reply.body = buffer_.substr(24 + session, body);
        reply.keep = buffer_.size() == 24 + session + body;  // else it is out of step
        buffer_.clear();
        return true;
    }

    bool read_http(detail::Reply& reply, Deadline deadline) {
        bool chunked = false;
        long long length = -1;
        while (reply.status < 200) {  // interim replies are passed over
            std::size_t end;
            while ((end = buffer_.find("\r\n\r\n")) == std::string::npos) {
                if (buffer_.size() > detail::max_head ||
                    buffer_.compare(0, 7, "HTTP/1.", std::min<std::size_t>(7, buffer_.size())) != 0)
                    throw detail::bad_reply("expected an HTTP/1.x reply, got " + detail::shown(buffer_));
                if (!receive(deadline)) return false;
            }
            read_head(buffer_.substr(0, end), reply, length, chunked);
            buffer_.erase(0, end + 4);
        }
        if (chunked) {
            if (!read_chunks(reply.body, deadline)) return false;
        } else if (length >= 0) {
            std::size_t size = static_cast<std::size_t>(length);
            while (buffer_.size() < size)
                if (!receive(deadline)) return false;
            reply.body = buffer_.substr(0, size);
            buffer_.erase(0, size);
        } else {
            reply.keep = false;
            while (receive(deadline))
                if (buffer_.size() > detail::max_reply) throw detail::bad_reply("expected a smaller reply");
            reply.body.swap(buffer_);
        }
        reply.keep = reply.keep && buffer_.empty();
        buffer_.clear();
        return true;
    }

    static void read_head(const std::string& head, detail::Reply& reply, long long& length, bool& chunked) {
        std::size_t end = std::min(head.find("\r\n"), head.size());
        const std::string first = head.substr(0, end);
        if (first.compare(0, 7, "HTTP/1.") != 0 || first.size() < 12 || !detail::digits(first.substr(9, 3)))
            throw detail::bad_reply("expected an HTTP/1.x status line, got " + detail::shown(first));
        reply.status = std::atoi(first.substr(9, 3).c_str());
        reply.keep = first[7] != '0';
        if (reply.status == 204 || reply.status == 304) length = 0;
        while (end < head.size()) {
            std::size_t next = std::min(head.find("\r\n", end + 2), head.size());
            const std::string line = head.substr(end + 2, next - end - 2);
            end = next;
            std::size_t colon = line.find(':');
            if (colon == std::string::npos) continue;
            const std::string name = detail::lower(detail::strip(line.substr(0, colon)));
            const std::string value = detail::lower(detail::strip(line.substr(colon + 1)));
            if (name == "content-length") {
                if (!detail::digits(value) || std::strtoull(value.c_str(), nullptr, 10) > detail::max_reply)
                    throw detail::bad_reply("expected a Content-Length up to 1 GiB, got " + detail::shown(value));
                length = std::atoll(value.c_str());
            } else if (name == "transfer-encoding" && value == "chunked") {
                chunked = true;
            } else if (name == "connection") {
                reply.keep = value == "keep-alive" || (reply.keep && value != "close");
            } else if (name == "retry-after" && detail::digits(value, 6)) {
                reply.retry_after = std::atoi(value.c_str());
            } else if (name == "session_secret" || name == "session-secret") {
                reply.secret = value;
            }
        }
    }

    bool read_chunks(std::string& body, Deadline deadline) {
        bool trailer = false;
        for (;;) {
            std::size_t end;
            while ((end = buffer_.find("\r\n")) == std::string::npos) {
                if (buffer_.size() > detail::max_head) throw detail::bad_reply("expected the size of a chunk");
                if (!receive(deadline)) return false;
            }
            const std::string line = buffer_.substr(0, end);
            buffer_.erase(0, end + 2);
            if (trailer) {
                if (line.empty()) return true;
                continue;
            }
            const std::string number = detail::strip(line.substr(0, line.find(';')));
            bool hex = number.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
            if (number.empty() || number.size() > 8 || !hex)
                throw detail::bad_reply("expected the size of a chunk, got " + detail::shown(line));
            std::size_t size = std::strtoull(number.c_str(), nullptr, 16);
            if (body.size() + size > detail::max_reply) throw detail::bad_reply("expected a smaller reply");
            trailer = size == 0;
            if (trailer) continue;
            while (buffer_.size() < size + 2)
                if (!receive(deadline)) return false;
            body.append(buffer_, 0, size);
            buffer_.erase(0, size + 2);
        }
    }

    Options options_;
    std::string session_;
    std::string secret_;  // of the session, where the service gives one
    std::string buffer_;  // bytes received and not used yet
    detail::Socket socket_ = detail::no_socket;
    std::uint64_t time_ = 0;  // numbers the requests; TCP echoes it
#ifdef BRAY_TLS
    SSL_CTX* context_ = nullptr;
    SSL* ssl_ = nullptr;
#endif
};

}  // namespace bray
