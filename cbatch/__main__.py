from cbatch.cli import main

main()
