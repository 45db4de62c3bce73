// Grid games that play over HTTP until they are ended:   games PORT GAMES COUNT_FILE
//
// The game is template/games/grid.py: the key and the door. One thread per game, each with a session and a connection of its own. The messages
// are those of bray.PolicyAgent: {"obs", "reward", "terminated", "truncated"} per tick, {"action"} back; the tick that ends an episode carries its
// final observation, and the next one begins another. The number of ticks so far is in COUNT_FILE, eight bytes per game.

#include "bray_client.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int size = 7, wall = 3, door = 3, limit = 100;

struct Place {
    int row, column;
    bool operator==(const Place& other) const { return row == other.row && column == other.column; }
};

class Grid {
public:
    explicit Grid(unsigned seed) : random_(seed) { reset(); }

    void reset() {
        const int agent = draw(size * wall);
        int key = draw(size * wall - 1);
        key += key >= agent;
        const int goal = draw(size * (size - wall - 1));
        agent_ = {agent / wall, agent % wall};
        key_ = {key / wall, key % wall};
        goal_ = {goal / (size - wall - 1), wall + 1 + goal % (size - wall - 1)};
        has_key_ = terminated = truncated = false;
        moves_ = 0;
        reward = 0.0;
    }

    void step(int action) {
        constexpr Place moves[] = {{-1, 0}, {1, 0}, {0, -1}, {0, 1}};
        const Place next = {agent_.row + moves[action].row, agent_.column + moves[action].column};
        const bool inside = next.row >= 0 && next.row < size && next.column >= 0 && next.column < size;
        if (inside && (next.column != wall || (next.row == door && has_key_))) agent_ = next;
        ++moves_;
        reward = -0.01;
        if (agent_ == key_ && !has_key_) {
            has_key_ = true;
            reward += 0.5;
        }
        terminated = agent_ == goal_;
        if (terminated) reward += 0.5;
        truncated = !terminated && moves_ == limit;
    }

    // The tick as JSON: 5 pictures of 7 x 7, 255 where a thing is.
    std::string message() const {
        std::array<std::array<std::array<bool, size>, size>, 5> planes{};
        for (int row = 0; row < size; ++row) planes[0][row][wall] = row != door;
        planes[1][agent_.row][agent_.column] = planes[4][goal_.row][goal_.column] = true;
        if (!has_key_) planes[2][key_.row][key_.column] = planes[3][door][wall] = true;
        std::string out = "{\"obs\": [";
        for (const auto& plane : planes) {
            out += &plane == &planes[0] ? "[" : ", [";
            for (const auto& row : plane) {
                out += &row == &plane[0] ? "[" : ", [";
                for (int i = 0; i < size; ++i) {
                    if (i) out += ", ";
                    out += row[i] ? "255" : "0";
                }
                out += "]";
            }
            out += "]";
        }
        char rest[96];
        std::snprintf(rest, sizeof rest, "], \"reward\": %g, \"terminated\": %s, \"truncated\": %s}", reward,
                      terminated ? "true" : "false", truncated ? "true" : "false");
        return out + rest;
    }

    double reward = 0.0;
    bool terminated = false, truncated = false;

private:
    int draw(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }

    std::mt19937 random_;
    Place agent_{}, key_{}, goal_{};
    bool has_key_ = false;
    int moves_ = 0;
};

void play(std::uint16_t port, unsigned seed, volatile std::int64_t* ticks) {
    bray::Options options;
    options.host = "127.0.0.1";
    options.port = port;
    options.timeout = 60;
    options.session = "grid" + std::to_string(seed);
    try {
        bray::Client client(options);
        client.start();
        Grid game(seed);
        for (;;) {
            const std::string reply = client.tick(game.message());
            const auto at = reply.find_first_of("0123456789", reply.find("\"action\""));
            if (at == std::string::npos) throw std::runtime_error("expected an action, got " + reply);
            *ticks = *ticks + 1;
            if (game.terminated || game.truncated) {
                game.reset();
            } else {
                game.step(reply[at] - '0');
            }
        }
    } catch (const std::exception& error) {
        std::cerr << "game " << seed << ": " << error.what() << std::endl;
        std::exit(1);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::cerr << "usage: " << argv[0] << " PORT GAMES COUNT_FILE\n";
        return 2;
    }
    const int games = std::atoi(argv[2]);
    const int file = ::open(argv[3], O_RDWR | O_CREAT, 0600);
    const std::size_t bytes = sizeof(std::int64_t) * static_cast<std::size_t>(games);
    if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) {
        std::perror(argv[3]);
        return 2;
    }
    auto* counts = static_cast<std::int64_t*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    std::vector<std::thread> threads;
    for (int i = 0; i < games; ++i)
        threads.emplace_back(play, static_cast<std::uint16_t>(std::atoi(argv[1])), static_cast<unsigned>(i), counts + i);
    for (auto& thread : threads) thread.join();
}
