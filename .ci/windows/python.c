// python.exe: panda3d's wheel has the interpreter as a library, without the program. Like its neighbours it does without Windows'
// headers and C library: Zig would compile them first, for a minute.
typedef __WCHAR_TYPE__ wide;

void *LoadLibraryW(const wide *name);
void *GetProcAddress(void *library, const char *name);
wide *GetCommandLineW(void);
wide **CommandLineToArgvW(const wide *line, int *count);
void ExitProcess(unsigned status);

int _tls_index; // of every program, in the C library

void start(void) {
    void *python = LoadLibraryW(L"python311.dll");
    int (*run)(int, wide **) = python ? (int (*)(int, wide **))GetProcAddress(python, "Py_Main") : 0;
    int count;
    wide **arguments = CommandLineToArgvW(GetCommandLineW(), &count);
    ExitProcess(run ? run(count, arguments) : 99);
}
