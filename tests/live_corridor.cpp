// A corridor of five cells, for tests/test_live.py:   live_corridor PORT EPISODES
//
// The game starts in a cell between the ends; action 1 steps right, 0 left. The right end is worth 1, each step costs 0.05, and the game is cut
// after 20 steps. Prints the return of each episode. Exit code 0: all played. 1: the service answered with an error, which is printed.

#include "bray_client.hpp"

#include <cstdlib>
#include <iostream>
#include <string>

static const int CELLS = 5, LIMIT = 20;

static int tick(bray::Client& client, int cell, double reward, bool terminated, bool truncated) {
    std::string obs;
    for (int i = 0; i < CELLS; ++i) obs += (i ? "," : "") + std::to_string(i == cell ? 1.0 : 0.0);
    std::string reply = client.tick("{\"obs\":[" + obs + "],\"reward\":" + std::to_string(reward) +
                                    ",\"terminated\":" + (terminated ? "true" : "false") +
                                    ",\"truncated\":" + (truncated ? "true" : "false") + "}");
    return std::atoi(reply.c_str() + reply.find("\"action\":") + 9);
}

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    bray::Options options;
    options.port = static_cast<std::uint16_t>(std::atoi(argv[1]));
    options.timeout = 60;
    options.retries = 0;
    std::srand(1);
    try {
        bray::Client client(options);
        client.start();
        for (int episode = 0; episode < std::atoi(argv[2]); ++episode) {
            int cell = 1 + std::rand() % (CELLS - 2);
            double total = 0.0, reward = 0.0;
            bool terminated = false, truncated = false;
            for (int step = 0; !terminated && !truncated; ++step) {
                cell += tick(client, cell, reward, false, false) == 1 ? 1 : -1;
                if (cell < 0) cell = 0;
                terminated = cell == CELLS - 1;
                truncated = !terminated && step + 1 == LIMIT;
                reward = terminated ? 1.0 : -0.05;
                total += reward;
            }
            tick(client, cell, reward, terminated, truncated);
            std::cout << total << std::endl;
        }
        client.end();
    } catch (const bray::ClientError& error) {
        std::cerr << "failed: " << error.what() << "\n";
        return 1;
    }
    return 0;
}
