from moebius_gateway.main import main

main()
