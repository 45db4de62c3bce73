// A load generator for game services: keep-alive HTTP or framed TCP, closed or open loop, one thread, epoll.
//
//   load --port P [--tcp] [--connections 32] [--sessions 32] [--seconds 5] [--warmup 1] [--rate R] [--body FILE|--bytes 1024]
//        [--no-start] [--path /step]
//
// Each session's ticks go over one connection (session s over connection s mod C), one at a time per connection with HTTP; with
// --elsewhere its start goes over another one, and a connection's sessions start on many, so that about half the ticks of two workers
// have to find their session's owner. --rate is requests/s in all, sent on time
// whatever the server does; latency then counts from the time a request was due. Prints one JSON object.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Waiting {
    int session;
    double due;
};

struct Connection {
    int fd = -1;
    std::string out, in;
    size_t sent = 0;
    std::deque<Waiting> waiting;  // requests on their way (HTTP: one)
    std::deque<Waiting> queue;    // requests that are due and could not be sent yet
    std::vector<int> sessions;
    size_t next = 0;
    bool broken = false;
};

static bool tcp = false;
static std::string path = "/step", body(1024, 'x');
static std::map<std::string, long> errors;
static std::vector<float> latencies;
static int poll_fd;
static int port = 8000;

static void put64(std::string& s, long long v) {
    for (int i = 7; i >= 0; --i) s.push_back(char((v >> (8 * i)) & 0xff));
}

static long long get64(const char* p) {
    long long v = 0;
    for (int i = 0; i < 8; ++i) v = (v << 8) | (unsigned char)p[i];
    return v;
}

static std::string request(const char* kind, int session, const std::string& data) {
    std::string name = "s" + std::to_string(session), out;
    if (tcp) {
        put64(out, (long long)name.size());
        put64(out, (long long)strlen(kind));
        put64(out, 0);
        put64(out, 0);
        put64(out, (long long)data.size());
        put64(out, session);
        return out + name + kind + data;
    }
    return "POST " + path + " HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: game/1.0\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
           "Content-Type: application/octet-stream\r\nX-Game: arena\r\nX-Build: 4711\r\nsession: " + name + "\r\nstep_kind: " + kind +
           "\r\nContent-Length: " + std::to_string(data.size()) + "\r\n\r\n" + data;
}

static void watch(Connection& c, size_t i, bool write) {
    epoll_event e{};
    e.events = write ? EPOLLIN | EPOLLOUT : EPOLLIN;
    e.data.u64 = i;
    epoll_ctl(poll_fd, EPOLL_CTL_MOD, c.fd, &e);
}

static void flush(Connection& c, size_t i) {
    while (c.sent < c.out.size()) {
        ssize_t n = ::send(c.fd, c.out.data() + c.sent, c.out.size() - c.sent, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN) {
                watch(c, i, true);
                return;
            }
            c.broken = true;
            return;
        }
        c.sent += size_t(n);
    }
    c.out.clear();
    c.sent = 0;
}

static void send_tick(Connection& c, size_t i, Waiting w) {
    c.waiting.push_back(w);
    c.out += request("tick", w.session, body);
    flush(c, i);
}

// The next complete reply in c.in: its status ("200", "503 overloaded", ...), or "" when there is none yet.
static std::string reply(Connection& c, int& session) {
    if (tcp) {
        if (c.in.size() < 24) return "";
        long long a = get64(c.in.data()), b = get64(c.in.data() + 8);
        session = int(get64(c.in.data() + 16));
        if ((long long)c.in.size() < 24 + a + b) return "";
        bool error = b >= 8 && memcmp(c.in.data() + 24 + a, "\0BRAYERR", 8) == 0;
        c.in.erase(0, size_t(24 + a + b));
        return error ? "error" : "200";
    }
    size_t end = c.in.find("\r\n\r\n");
    if (end == std::string::npos) return "";
    std::string head = c.in.substr(0, end);
    std::transform(head.begin(), head.end(), head.begin(), ::tolower);
    size_t at = head.find("content-length:");
    size_t size = at == std::string::npos ? 0 : std::strtoul(head.c_str() + at + 15, nullptr, 10);
    if (c.in.size() < end + 4 + size) return "";
    std::string status = head.substr(9, 3);
    c.in.erase(0, end + 4 + size);
    return status;
}

static int connect_to() {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_port = htons(uint16_t(port));
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) != 0) {
        perror("connect");
        exit(1);
    }
    return fd;
}

// One request and its reply, waiting; for the starts.
static std::string ask(Connection& c, const char* kind, int session) {
    std::string data = request(kind, session, "");
    if (::send(c.fd, data.data(), data.size(), MSG_NOSIGNAL) != ssize_t(data.size())) return "lost";
    char buffer[65536];
    int who;
    std::string status;
    while ((status = reply(c, who)).empty()) {
        ssize_t n = recv(c.fd, buffer, sizeof buffer, 0);
        if (n <= 0) return "lost";
        c.in.append(buffer, size_t(n));
    }
    return status;
}

int main(int argc, char** argv) {
    size_t connections = 32, sessions = 32;
    double seconds = 5, warmup = 1, rate = 0;
    bool start = true, elsewhere = false;
    for (int i = 1; i < argc; ++i) {
        std::string name = argv[i];
        auto value = [&] { return std::string(i + 1 < argc ? argv[++i] : "0"); };
        if (name == "--port") port = atoi(value().c_str());
        else if (name == "--tcp") tcp = true;
        else if (name == "--connections") connections = size_t(atoi(value().c_str()));
        else if (name == "--sessions") sessions = size_t(atoi(value().c_str()));
        else if (name == "--seconds") seconds = atof(value().c_str());
        else if (name == "--warmup") warmup = atof(value().c_str());
        else if (name == "--rate") rate = atof(value().c_str());
        else if (name == "--bytes") body.assign(size_t(atoi(value().c_str())), 'x');
        else if (name == "--path") path = value();
        else if (name == "--no-start") start = false;
        else if (name == "--elsewhere") elsewhere = true;
        else if (name == "--body") {
            std::ifstream f(value(), std::ios::binary);
            std::stringstream s;
            s << f.rdbuf();
            body = s.str();
        } else {
            fprintf(stderr, "unknown option %s\n", name.c_str());
            return 2;
        }
    }
    std::vector<Connection> all(connections);
    for (auto& c : all) c.fd = connect_to();
    long refused = 0;
    for (size_t s = 0; s < sessions; ++s) {
        all[s % connections].sessions.push_back(int(s));
        if (start && ask(all[elsewhere ? (s * 7 + s / connections * 5 + 3) % connections : s % connections], "start", int(s)) != "200") ++refused;
    }
    poll_fd = epoll_create1(0);
    for (size_t i = 0; i < connections; ++i) {
        fcntl(all[i].fd, F_SETFL, O_NONBLOCK);
        epoll_event e{};
        e.events = EPOLLIN;
        e.data.u64 = i;
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, all[i].fd, &e);
    }
    auto pick = [](Connection& c) { return c.sessions[c.next++ % c.sessions.size()]; };
    double begin = now(), measure = begin + warmup, over = measure + seconds, due = begin;
    long done = 0, sent = 0;
    latencies.reserve(1 << 22);
    if (rate <= 0)
        for (size_t i = 0; i < connections; ++i) {
            if (all[i].sessions.empty()) continue;
            size_t at_once = tcp ? all[i].sessions.size() : 1;
            for (size_t k = 0; k < at_once; ++k) send_tick(all[i], i, {pick(all[i]), now()});
        }
    std::vector<epoll_event> events(connections);
    std::vector<char> buffer(1 << 20);
    size_t turn = 0;
    long alive = long(connections);
    while (now() < over && alive > 0) {
        if (rate > 0) {
            double t = now();
            while (due <= t) {
                size_t i = turn++ % connections;
                Connection& c = all[i];
                if (!c.broken && !c.sessions.empty()) {
                    Waiting w{pick(c), due};
                    if (tcp || c.waiting.empty()) send_tick(c, i, w);
                    else c.queue.push_back(w);
                    ++sent;
                }
                due += 1.0 / rate;
            }
        }
        // open loop: epoll_wait has milliseconds, so short pauses are spun
        int wait = rate > 0 ? (due - now() > 0.002 ? 1 : 0) : 100;
        int n = epoll_wait(poll_fd, events.data(), int(events.size()), wait);
        for (int k = 0; k < n; ++k) {
            size_t i = events[size_t(k)].data.u64;
            Connection& c = all[i];
            if (events[size_t(k)].events & EPOLLOUT) {
                watch(c, i, false);
                flush(c, i);
            }
            if (events[size_t(k)].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
                ssize_t got = recv(c.fd, buffer.data(), buffer.size(), 0);
                if (got == 0 || (got < 0 && errno != EAGAIN)) c.broken = true;
                if (got > 0) c.in.append(buffer.data(), size_t(got));
                int session = 0;
                std::string status;
                while (!(status = reply(c, session)).empty()) {
                    double t = now();
                    auto w = c.waiting.begin();
                    if (tcp) w = std::find_if(c.waiting.begin(), c.waiting.end(), [&](const Waiting& x) { return x.session == session; });
                    if (w == c.waiting.end()) continue;
                    double since = w->due;
                    c.waiting.erase(w);
                    if (t >= measure) {
                        if (status == "200") {
                            ++done;
                            latencies.push_back(float((t - since) * 1e6));
                        } else {
                            ++errors[status];
                        }
                    }
                    if (rate <= 0) {
                        send_tick(c, i, {tcp ? session : pick(c), t});
                    } else if (!c.queue.empty()) {
                        Waiting q = c.queue.front();
                        c.queue.pop_front();
                        send_tick(c, i, q);
                    }
                }
                if (c.broken && c.fd >= 0) {
                    ++errors["connection lost"];
                    close(c.fd);
                    c.fd = -1;
                    --alive;
                }
            }
        }
    }
    double took = now() - measure;
    std::sort(latencies.begin(), latencies.end());
    auto q = [&](double p) { return latencies.empty() ? 0.0 : double(latencies[std::min(latencies.size() - 1, size_t(p * double(latencies.size())))]); };
    printf("{\"requests\": %ld, \"seconds\": %.3f, \"per_second\": %.1f, \"p50_us\": %.0f, \"p90_us\": %.0f, \"p99_us\": %.0f, \"max_us\": %.0f, \"not_started\": %ld, \"errors\": {",
           done, took, double(done) / took, q(0.5), q(0.9), q(0.99), q(1.0), refused);
    bool first = true;
    for (auto& [k, v] : errors) {
        printf("%s\"%s\": %ld", first ? "" : ", ", k.c_str(), v);
        first = false;
    }
    printf("}}\n");
    return 0;
}
