// A game that plays N ticks and prints the replies:   example HOST PORT http|tcp TICKS [SESSION]
//
// Build:   cmake -S clients/cpp -B build && cmake --build build
// Exit code 0: played to the end. 1: the service answered with an error, which is printed. 2: wrong arguments.

#include "bray_client.hpp"

#include <cstdlib>
#include <iostream>
#include <string>

int main(int argc, char** argv) {
    if (argc < 5) {
        std::cerr << "usage: " << argv[0] << " HOST PORT http|tcp TICKS [SESSION]\n";
        return 2;
    }
    bray::Options options;
    options.host = argv[1];
    options.port = static_cast<std::uint16_t>(std::atoi(argv[2]));
    options.tcp = std::string(argv[3]) == "tcp";
    options.timeout = 10;
    if (argc > 5) options.session = argv[5];
    try {
        bray::Client client(options);
        std::cout << client.start() << "\n";
        for (int i = 0; i < std::atoi(argv[4]); ++i) {
            std::string reply = client.tick("{\"obs\": [" + std::to_string(i) + ", 0.5]}");
            std::cout << reply << "\n";
        }
        std::cout << client.end() << "\n";
    } catch (const bray::ClientError& error) {
        std::cerr << "failed: " << error.what() << "\n";
        return 1;
    }
    return 0;
}
