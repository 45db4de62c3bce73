// A client that is told what to do, line by line on its standard input; the tests play it against servers that
// misbehave. Bytes are hex, `-` is nothing, `x*N` is the letter N times.
//
//     new HOST PORT http|tcp TIMEOUT RETRIES SESSION TOKEN KEY [CA_FILE]      with a CA_FILE over TLS
//     start GAME AGENT DATA | tick DATA [idempotent] | end DATA | step DATA [idempotent] | session | bench N DATA
//
// Each line is answered by `ok HEX` or `error CLASS STATUS CODE MESSAGE`.

#include "bray_client.hpp"

#include <iostream>
#include <memory>
#include <sstream>
#include <string>

namespace {

std::string from_hex(const std::string& hex) {
    if (hex.compare(0, 2, "x*") == 0) return std::string(std::stoul(hex.substr(2)), 'x');
    std::string out;
    for (std::size_t i = 0; hex != "-" && i + 1 < hex.size(); i += 2)
        out.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    return out;
}

std::string to_hex(const std::string& bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string out;
    for (char c : bytes) {
        out.push_back(digits[(static_cast<unsigned char>(c) >> 4) & 15]);
        out.push_back(digits[static_cast<unsigned char>(c) & 15]);
    }
    return out.empty() ? "-" : out;
}

std::string text(const std::string& word) { return word == "-" ? "" : word; }

std::string obey(std::unique_ptr<bray::Client>& client, const std::string& line) {
    std::istringstream words(line);
    std::string what, a, b, c;
    words >> what;
    if (what == "new") {
        bray::Options options;
        std::string protocol, session, token, key, ca;
        words >> options.host >> options.port >> protocol >> options.timeout >> options.retries;
        words >> session >> token >> key >> ca;
        options.tcp = protocol == "tcp";
        options.session = text(session);
        options.token = text(token);
        options.key = text(key);
        options.tls = !ca.empty();
        options.tls_ca = ca;
        client = std::make_unique<bray::Client>(std::move(options));
        return "";
    }
    words >> a >> b >> c;
    if (what == "start") return client->start(text(a), text(b), from_hex(c));
    if (what == "tick") return client->tick(from_hex(a), b == "idempotent");
    if (what == "end") return client->end(from_hex(a));
    if (what == "step") return client->step(from_hex(a), b == "idempotent");
    if (what == "session") return client->session();
    if (what == "bench") {
        const std::string data = from_hex(b);
        auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < std::stoi(a); ++i) client->tick(data);
        return std::to_string(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    throw std::invalid_argument("unknown order " + what);
}

std::string failed(const char* kind, const bray::ClientError& error) {
    return std::string("error ") + kind + " " + std::to_string(error.status) + " " + error.code + " " + error.message;
}

}  // namespace

int main() {
    std::unique_ptr<bray::Client> client;
    std::string line;
    while (std::getline(std::cin, line)) {
        std::string answer;
        try {
            answer = "ok " + to_hex(obey(client, line));
        } catch (const bray::SessionLost& error) {
            answer = failed("SessionLost", error);
        } catch (const bray::ConnectFailed& error) {
            answer = failed("ConnectFailed", error);
        } catch (const bray::ConnectionLost& error) {
            answer = failed("ConnectionLost", error);
        } catch (const bray::ClientError& error) {
            answer = failed("ClientError", error);
        } catch (const std::invalid_argument& error) {
            answer = std::string("error InvalidArgument 0 - ") + error.what();
        }
        std::cout << answer << std::endl;
    }
    return 0;
}
