from weft.cli.main import main

raise SystemExit(main())
