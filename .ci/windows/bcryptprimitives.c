// bcryptprimitives.dll, for modules written in Rust: Wine 8 lacks it.
int _tls_index;

unsigned char SystemFunction036(void *bytes, unsigned long count); // RtlGenRandom

__declspec(dllexport) int ProcessPrng(void *bytes, unsigned long long count) { return SystemFunction036(bytes, count); }

int start(void *library, unsigned long reason, void *reserved) { return 1; }
